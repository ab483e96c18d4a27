/* What must hold between keys: see topology_pvt.h.
 *
 * Each value is legal alone when these run; each rule names the key that is to be changed and prints the arithmetic, because a run that
 * cannot ever fill a step would otherwise start, load for minutes, and wait for ever.
 */
#include "data/topology_pvt.h"

#include <ctype.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static int name_rule(const struct mr_topology *t, struct mr_err *err)
{
    const char *s = t->run.name;
    size_t n = strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");

    if (s[n] || !isalnum((unsigned char)s[0]))
        return mr_json_error(&t->src, "/run/name", err,
                             "is \"%s\"; a letter or digit, then letters, digits, '.', '_' and '-' are wanted: the name "
                             "is part of file names",
                             s);
    return 0;
}

static int ascending(const struct mr_topology *t, const char *ptr, const int *v, int n, struct mr_err *err)
{
    char at[64];

    for (int i = 1; i < n; i++) {
        snprintf(at, sizeof at, "%s/%d", ptr, i);
        if (v[i] <= v[i - 1])
            return mr_json_error(&t->src, at, err, "is %d after %d; strictly ascending values are wanted", v[i], v[i - 1]);
    }
    return 0;
}

static int data_rules(const struct mr_topology *t, struct mr_err *err)
{
    const int last = t->data.buckets[t->data.n_buckets - 1];

    if (ascending(t, "/target/layers", t->target.layers, t->target.n_layers, err) ||
        ascending(t, "/data/buckets", t->data.buckets, t->data.n_buckets, err))
        return -1;
    if (t->data.min_tokens > t->data.max_tokens)
        return mr_json_error(&t->src, "/data/min_tokens", err, "is %d, above max_tokens = %d: no sample can be used", t->data.min_tokens,
                             t->data.max_tokens);
    if (last < t->data.max_tokens)
        return mr_json_error(&t->src, "/data/buckets", err, "ends at %d, but max_tokens is %d: samples of %d..%d tokens have no bucket",
                             last, t->data.max_tokens, last + 1, t->data.max_tokens);
    if (t->data.token_budget < t->data.max_tokens)
        return mr_json_error(&t->src, "/data/token_budget", err,
                             "is %d, but one sample may have max_tokens = %d: a microbatch must hold it", t->data.token_budget,
                             t->data.max_tokens);
    return 0;
}

static int drafter_rules(const struct mr_topology *t, struct mr_err *err)
{
    const int heads = t->drafter.num_attention_heads, kv = t->drafter.num_key_value_heads;

    if (heads && kv && heads % kv)
        return mr_json_error(&t->src, "/drafter/num_key_value_heads", err, "is %d, which does not divide num_attention_heads = %d", kv,
                             heads);
    if (t->drafter.head_dim % 2)
        return mr_json_error(&t->src, "/drafter/head_dim", err, "is %d; an even number is wanted", t->drafter.head_dim);
    if (t->drafter.n_sliding > t->drafter.layers)
        return mr_json_error(&t->src, "/drafter/sliding_layers", err, "is %d, but there are %d layers", t->drafter.n_sliding,
                             t->drafter.layers);
    if (t->drafter.n_sliding && !t->drafter.sliding_window)
        return mr_json_error(&t->src, "/drafter/sliding_layers", err, "is %d, but sliding_window is 0: set the window",
                             t->drafter.n_sliding);
    if (t->drafter.sliding_window && t->drafter.sliding_window < t->drafter.block_size)
        return mr_json_error(&t->src, "/drafter/sliding_window", err,
                             "is %d, shorter than a block of %d: the last slots would see no context", t->drafter.sliding_window,
                             t->drafter.block_size);
    if (strcmp(t->drafter.init, "normal") && strncmp(t->drafter.init, "checkpoint:/", 12))
        return mr_json_error(&t->src, "/drafter/init", err, "is \"%s\"; \"normal\" or \"checkpoint:DIR\" is wanted", t->drafter.init);
    return 0;
}

static int count_rules(const struct mr_topology *t, struct mr_err *err)
{
    int feeders = 0;
    const int M = t->train.grad_accum * t->n_drafters;

    for (int i = 0; i < t->n_actors; i++)
        feeders += t->actor[i].kind == MR_FEEDER;
    if (feeders != 1)
        return mr_json_error(&t->src, "/actors", err, "has %d feeders; exactly one is wanted: {\"kind\": \"feeder\"}", feeders);
    if (!t->n_targets || !t->n_drafters)
        return mr_json_error(&t->src, "/actors", err, "has %d targets and %d drafters; at least one of each is wanted", t->n_targets,
                             t->n_drafters);
    if (t->n_drafters > MR_MAX_DRAFTERS)
        return mr_json_error(&t->src, "/actors", err, "has %d drafters; at most %d are allowed", t->n_drafters, MR_MAX_DRAFTERS);
    if (M > MR_MAX_PLACES)
        return mr_json_error(&t->src, "/train/grad_accum", err,
                             "a step would have %d microbatches: grad_accum %d x %d drafters; at most %d are allowed", M,
                             t->train.grad_accum, t->n_drafters, MR_MAX_PLACES);
    for (int i = 0; i < t->n_actors; i++)
        for (int k = 0; k < i; k++)
            if (t->actor[i].kind == MR_KEEPER && t->actor[k].kind == MR_KEEPER && t->actor[i].device_index == t->actor[k].device_index)
                return mr_json_error(&t->src, "/actors", err, "has two keepers on %s; one per device is wanted", t->actor[i].device);
    return 0;
}

static int slab_rules(const struct mr_topology *t, struct mr_err *err)
{
    const int M = mr_topo_places(t), slabs = mr_topo_slabs(t), per = t->queue.slabs_per_device;
    char on[300] = "";
    int n = 0;

    for (int d = 0; d < t->n_devices; d++)
        if (mr_topo_slabs_on(t, d) && n++ < 6)
            snprintf(on + strlen(on), sizeof on - strlen(on), "%s%s", n > 1 ? ", " : "", t->device[d]);
    if (slabs < M)
        return mr_json_error(&t->src, "/queue/slabs_per_device", err,
                             "a step needs >= %d slabs: grad_accum %d x %d drafters; has %d = "
                             "slabs_per_device %d x %d device%s that targets write to (%s)",
                             M, t->train.grad_accum, t->n_drafters, slabs, per, n, n > 1 ? "s" : "", on);
    if (slabs + t->n_targets > MR_MAX_ITEMS)
        return mr_json_error(&t->src, "/queue/slabs_per_device", err, "%d slabs + %d targets = %d items; at most %d are allowed", slabs,
                             t->n_targets, slabs + t->n_targets, MR_MAX_ITEMS);
    return 0;
}

static int engine_rules(const struct mr_topology *t, struct mr_err *err)
{
    int targets = 0, drafters = 0, all;
    const int synthetic_model = !strncmp(t->target.checkpoint, "synthetic:", 10);

    for (int i = 0; i < t->n_actors; i++) {
        targets += t->actor[i].kind == MR_TARGET && t->actor[i].engine == MR_ENGINE_SYNTHETIC;
        drafters += t->actor[i].kind == MR_DRAFTER && t->actor[i].engine == MR_ENGINE_SYNTHETIC;
    }
    all = targets == t->n_targets && drafters == t->n_drafters;
    if (!all && targets + drafters > 0)
        return mr_json_error(&t->src, "/actors", err,
                             "%d of %d targets and %d of %d drafters are synthetic; all or none is wanted: the hidden states "
                             "of a synthetic target mean nothing",
                             targets, t->n_targets, drafters, t->n_drafters);
    if (all != synthetic_model)
        return mr_json_error(&t->src, "/target/checkpoint", err,
                             all ? "all actors are synthetic, so \"synthetic:hidden=H,layers=L,vocab=V\" is wanted"
                                 : "is synthetic, but the actors are not: set \"engine\": \"synthetic\" for them, or "
                                   "give a checkpoint directory");
    return 0;
}

/* Hidden states are bf16 in GPU memory, or f32 in /dev/shm; a GPU target can make both, every other pair only one. */
static int mixed_rule(const struct mr_topology *t, struct mr_err *err)
{
    int on_gpu[MR_KINDS] = {0};

    for (int i = 0; i < t->n_actors; i++)
        on_gpu[t->actor[i].kind] += t->actor[i].engine == MR_ENGINE_CUDA;
    if (on_gpu[MR_DRAFTER] && (on_gpu[MR_DRAFTER] < t->n_drafters || on_gpu[MR_TARGET] < t->n_targets))
        return mr_json_error(&t->src, "/actors", err,
                             "%d of %d drafters and %d of %d targets are on GPUs; with a drafter on a GPU all of them must be (GPU targets "
                             "with cpu drafters are fine)",
                             on_gpu[MR_DRAFTER], t->n_drafters, on_gpu[MR_TARGET], t->n_targets);
    return 0;
}

/* NCCL wants a GPU for each rank, and the other reductions read f32. */
static int reduce_rule(const struct mr_topology *t, struct mr_err *err)
{
    const struct mr_topo_actor *a = t->actor;

    if (t->train.bf16_wire && t->train.reduce != 2)
        return mr_json_error(&t->src, "/train/reduce_wire", err, "is \"bf16\", which only /train/reduce \"nccl\" can send");
    for (int i = 0; i < t->n_actors && t->train.reduce; i++) {
        if (a[i].kind != MR_DRAFTER)
            continue;
        if (a[i].engine != MR_ENGINE_CUDA)
            return mr_json_error(&t->src, "/train/reduce", err, "is for drafters on GPUs; drafter/%u is on %s: leave it \"auto\"", a[i].index,
                                 a[i].device);
        for (int k = 0; k < i && t->train.reduce == 2; k++)
            if (a[k].kind == MR_DRAFTER && a[k].device_index == a[i].device_index)
                return mr_json_error(&t->src, "/train/reduce", err,
                                     "is \"nccl\", which allows one rank per GPU, but drafter/%u and drafter/%u are both on %s: use \"p2p\"",
                                     a[k].index, a[i].index, a[i].device);
    }
    return 0;
}

/* A number, so that neither a name server nor its absence decides whether a run starts.  Brackets are for IPv6, whose colons need them. */
static int host_ok(const char *s, size_t n)
{
    struct addrinfo hint = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM}, *ai = NULL;
    const int bracket = n >= 2 && s[0] == '[' && s[n - 1] == ']';
    char host[64];
    int ok;

    if (n >= sizeof host || (!bracket && memchr(s, ':', n)))
        return 0;
    snprintf(host, sizeof host, "%.*s", (int)n - 2 * bracket, s + bracket);
    ok = *host && !getaddrinfo(host, NULL, &hint, &ai);
    if (ok)
        freeaddrinfo(ai);
    return ok;
}

/* "HOST:PORT", or "" */
static int listen_rule(const struct mr_topology *t, struct mr_err *err)
{
    const char *s = t->metrics.listen, *colon = strrchr(s, ':'), *port = colon ? colon + 1 : "";
    size_t digits = strspn(port, "0123456789");

    if (!*s)
        return 0;
    if (!digits || digits > 5 || port[digits] || atoi(port) > 65535 || colon == s)
        return mr_json_error(&t->src, "/metrics/listen", err, "is \"%s\"; HOST:PORT with a port 0..65535 is wanted, or \"\" for off", s);
    if (!host_ok(s, (size_t)(colon - s)))
        return mr_json_error(&t->src, "/metrics/listen", err,
                             "is \"%s\"; HOST must be a numeric address: 127.0.0.1 (this machine), 0.0.0.0 (all of its addresses), or "
                             "in brackets [::1]",
                             s);
    return 0;
}

int mr_topology_rules(const struct mr_topology *t, struct mr_err *err)
{
    return name_rule(t, err) || data_rules(t, err) || drafter_rules(t, err) || count_rules(t, err) || slab_rules(t, err) ||
                   engine_rules(t, err) || mixed_rule(t, err) || reduce_rule(t, err) || listen_rule(t, err)
               ? -1
               : 0;
}
