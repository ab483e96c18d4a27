/* Loading, expanding and saving a topology: see topology.h.  The keys are in topology_keys.c, the relations in topology_rules.c. */
#include "data/topology.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "data/topology_keys.h"
#include "data/topology_pvt.h"

/* ---- actors --------------------------------------------------------------------------------------------------------------- */

static int device_ok(const char *s)
{
    char *end;

    if (!strcmp(s, "cpu"))
        return 1;
    if (!strncmp(s, "cuda:", 5) && isdigit((unsigned char)s[5]))
        return strtoul(s + 5, &end, 10) < 64 && !*end;
    return !strncmp(s, "GPU-", 4) && strlen(s) > 8 && s[4 + strspn(s + 4, "0123456789abcdefABCDEF-")] == 0;
}

static int check_entry(const struct mr_json *j, const char *where, const struct mr_actor_entry *e, struct mr_err *err)
{
    char ptr[64];

    snprintf(ptr, sizeof ptr, "%s/device", where);
    if (!device_ok(e->device))
        return mr_json_error(j, ptr, err, "is \"%s\"; \"cpu\", \"cuda:N\" or \"GPU-uuid\" is wanted", e->device);
    if (e->kind == MR_FEEDER && strcmp(e->device, "cpu"))
        return mr_json_error(j, ptr, err, "is \"%s\", but a feeder runs on the cpu", e->device);
    if (e->kind == MR_KEEPER && !strcmp(e->device, "cpu"))
        return mr_json_error(j, ptr, err, "is \"cpu\", but keepers hold GPU memory; on the cpu /dev/shm does: remove this actor");
    snprintf(ptr, sizeof ptr, "%s/engine", where);
    if (e->engine && (e->kind == MR_FEEDER || e->kind == MR_KEEPER))
        return mr_json_error(j, ptr, err, "a %s has no engine: remove the key", mr_kind_name((enum mr_kind)e->kind));
    return 0;
}

/* Index of the device, added when new; -1 when the table is full. */
static int device_index(struct mr_topology *t, const char *device)
{
    for (int i = 0; i < t->n_devices; i++)
        if (!strcmp(t->device[i], device))
            return i;
    if (t->n_devices == MR_TOPO_DEVICES)
        return -1;
    strcpy(t->device[t->n_devices], device);
    return t->n_devices++;
}

static int add_actor(struct mr_topology *t, const struct mr_actor_entry *e, unsigned index, struct mr_err *err)
{
    struct mr_topo_actor *a = &t->actor[t->n_actors];
    int d = e->kind == MR_FEEDER ? 0 : device_index(t, e->device);

    if (t->n_actors == MR_MAX_ACTORS)
        return mr_json_error(&t->src, "/actors", err, "more than %d actors", MR_MAX_ACTORS);
    if (d < 0)
        return mr_json_error(&t->src, "/actors", err, "more than %d devices", MR_TOPO_DEVICES);
    *a = (struct mr_topo_actor){.kind = (enum mr_kind)e->kind,
                                .index = index,
                                .device_index = (unsigned)d,
                                .threads = e->threads,
                                .us_per_token = e->us_per_token,
                                .us_per_item = e->us_per_item,
                                .jitter = e->jitter};
    a->engine = e->engine ? MR_ENGINE_SYNTHETIC : !strcmp(e->device, "cpu") ? MR_ENGINE_CPU : MR_ENGINE_CUDA;
    strcpy(a->device, e->device);
    t->n_actors++;
    return 0;
}

/* Slot order: feeder, targets, drafters, keepers, whatever the order in the file. */
static int add_kind(struct mr_topology *t, const struct mr_actor_entry *entry, int n, int kind, int *count, struct mr_err *err)
{
    *count = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; entry[i].kind == kind && k < entry[i].count; k++)
            if (add_actor(t, &entry[i], (unsigned)(*count)++, err))
                return -1;
    return 0;
}

/* One keeper per CUDA device of a target or drafter that really uses it. */
static int add_keepers(struct mr_topology *t, struct mr_err *err)
{
    const int n = t->n_actors;

    for (int i = 0; i < n; i++) {
        struct mr_actor_entry e = {.kind = MR_KEEPER, .count = 1, .threads = 1};
        int have = t->actor[i].kind == MR_KEEPER || t->actor[i].engine != MR_ENGINE_CUDA;

        for (int k = 0; k < t->n_actors && !have; k++)
            have = t->actor[k].kind == MR_KEEPER && !strcmp(t->actor[k].device, t->actor[i].device);
        if (have)
            continue;
        strcpy(e.device, t->actor[i].device);
        if (add_actor(t, &e, (unsigned)t->n_keepers++, err))
            return -1;
    }
    return 0;
}

static int parse_actors(struct mr_topology *t, struct mr_err *err)
{
    json_t *list = mr_json_at(t->src.root, "/actors");
    int n = (int)json_array_size(list), feeders, rc = 0;
    struct mr_actor_entry *entry;
    char where[40];

    if (!n || n > MR_MAX_ACTORS)
        return mr_json_error(&t->src, "/actors", err, "has %d entries; 1..%d are wanted: a feeder, targets, drafters", n, MR_MAX_ACTORS);
    entry = calloc((size_t)n, sizeof *entry);
    if (!entry)
        return mr_err_set(err, MR_EXIT_ENV, "out of memory");
    for (int i = 0; i < n && !rc; i++) {
        snprintf(where, sizeof where, "/actors/%d", i);
        rc = mr_keys_parse(&t->src, where, &entry[i], err) || check_entry(&t->src, where, &entry[i], err) ? -1 : 0;
    }
    if (!rc)
        rc = add_kind(t, entry, n, MR_FEEDER, &feeders, err) || add_kind(t, entry, n, MR_TARGET, &t->n_targets, err) ||
                     add_kind(t, entry, n, MR_DRAFTER, &t->n_drafters, err) || add_kind(t, entry, n, MR_KEEPER, &t->n_keepers, err) ||
                     add_keepers(t, err)
                 ? -1
                 : 0;
    free(entry);
    return rc;
}

/* ---- slabs ---------------------------------------------------------------------------------------------------------------- */

int mr_topo_slabs_on(const struct mr_topology *t, int d)
{
    for (int i = 0; i < t->n_actors; i++)
        if (t->actor[i].kind == MR_TARGET && t->actor[i].device_index == (unsigned)d)
            return 1;
    return 0;
}

int mr_topo_slabs(const struct mr_topology *t)
{
    int n = 0;

    for (int d = 0; d < t->n_devices; d++)
        n += mr_topo_slabs_on(t, d) ? t->queue.slabs_per_device : 0;
    return n;
}

/* ---- load and save -------------------------------------------------------------------------------------------------------- */

/* Defaults that depend on other keys. */
static int compute_defaults(struct mr_topology *t, struct mr_err *err)
{
    char dir[MR_NAME_MAX + 8];

    snprintf(dir, sizeof dir, "runs/%s", t->run.name);
    if (!*t->run.dir && mr_path_absolute(dir, t->run.dir, sizeof t->run.dir))
        return mr_json_error(&t->src, "/run/dir", err, "the default is too long as an absolute path: set the key");
    if (!t->data.n_buckets)
        t->data.buckets[t->data.n_buckets++] = t->data.max_tokens;
    if (!t->data.token_budget)
        t->data.token_budget = t->data.max_tokens;
    if (t->train.loss_decay < 0)
        t->train.loss_decay = t->drafter.block_size <= 8 ? 4 : t->drafter.block_size <= 12 ? 5 : 7;
    if (!t->queue.slabs_per_device && t->n_drafters && t->n_targets) {
        int m2 = 2 * mr_topo_places(t), room = (MR_MAX_ITEMS - t->n_targets) / t->n_devices;

        t->queue.slabs_per_device = m2 < room ? m2 : room;
    }
    return 0;
}

static int parse_all(struct mr_topology *t, const char *const *set, int n_set, struct mr_err *err)
{
    for (int i = 0; i < n_set; i++)
        if (mr_json_set(&t->src, set[i], err))
            return -1;
    t->train.loss_decay = -1;
    if (mr_keys_check_names(&t->src, err) || mr_keys_parse(&t->src, "", t, err) || parse_actors(t, err) || compute_defaults(t, err))
        return -1;
    return mr_topology_rules(t, err);
}

int mr_topology_load(struct mr_topology *t, const char *path, const char *const *set, int n_set, struct mr_err *err)
{
    memset(t, 0, sizeof *t);
    if (mr_json_load_big(&t->src, path, err))
        return -1;
    if (!parse_all(t, set, n_set, err))
        return 0;
    mr_topology_free(t);
    return -1;
}

void mr_topology_free(struct mr_topology *t)
{
    mr_json_free(&t->src);
}

int mr_topology_save(const struct mr_topology *t, const char *path, struct mr_err *err)
{
    json_t *root = json_object(), *actors = json_array();
    int rc;

    mr_keys_write(root, t, 0);
    for (int i = 0; i < t->n_actors; i++) {
        const struct mr_topo_actor *a = &t->actor[i];
        struct mr_actor_entry e = {.kind = (int)a->kind,
                                   .engine = a->engine == MR_ENGINE_SYNTHETIC,
                                   .count = 1,
                                   .threads = a->threads,
                                   .us_per_token = a->us_per_token,
                                   .us_per_item = a->us_per_item,
                                   .jitter = a->jitter};
        json_t *one = json_object();

        strcpy(e.device, a->device);
        mr_keys_write(one, &e, 1);
        json_array_append_new(actors, one);
    }
    json_object_set_new(root, "actors", actors);
    rc = mr_json_save(root, path, err);
    json_decref(root);
    return rc;
}
