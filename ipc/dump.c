/* Text dumps of the shared objects (see dump.h).
 *
 * They read a running or damaged run without any claim on it: words are atomic loads, payload is copied racily, every index and string is
 * clipped.  What is printed may be torn between two lines, never out of bounds.
 */
#include "ipc/dump.h"

#include <string.h>

#include "base/clock.h"
#include "ipc/ipc_pvt.h"
#include "ipc/item.h"
#include "ipc/ring.h"
#include "ipc/step.h"

MR_RACY static void snap(void *dst, const void *src, size_t n)
{
    volatile const uint8_t *from = src;

    for (size_t i = 0; i < n; i++)
        ((uint8_t *)dst)[i] = from[i];
}

void mr_seg_dump(const struct mr_seg *s, FILE *f)
{
    struct mr_shm_header h;

    snap(&h, s->hdr, sizeof h);
    fprintf(f, "run %.*s id %016llx supervisor %d boot %.36s\n", MR_NAME_MAX, h.run, (unsigned long long)h.run_id, h.sup_pid, h.boot_id);
    fprintf(f, "  %u actors (%u targets, %u drafters), %u items, %u slabs, %u arenas, %u buckets, %u places a step\n", h.n_actors,
            h.n_targets, h.n_drafters, h.n_items, h.n_slabs, h.n_arenas, h.n_buckets, h.n_places);
    fprintf(f, "  %u epochs, %u steps from %u, %u microbatches of at most %u tokens%s\n", h.n_epochs, h.steps_total, h.first_step,
            h.microbatches_total, h.token_budget, h.deterministic ? ", deterministic" : "");
    fprintf(f, "  cursor %llu, plan epochs %llu, ledger %llu, latest checkpoint %llu\n", (unsigned long long)h.cursor,
            (unsigned long long)h.plan_epochs, (unsigned long long)h.ledger_done, (unsigned long long)h.ckpt_latest);
    fprintf(f, "  abort %u stop %u sweep %u fatal %u; event counts", h.abort, h.stop, h.sweep, h.fatal);
    for (unsigned k = 0; k < MR_KINDS; k++)
        fprintf(f, " %s %u%s late %u", mr_kind_name((enum mr_kind)k), h.evc[k].seq / 2, h.evc[k].seq & 1 ? " (sleepers)" : "",
                h.evc[k].late);
    fprintf(f, "\n");
}

static const char *actor_state_name(unsigned state)
{
    static const char *const name[] = {"empty", "starting", "running", "dead", "backoff", "done"};

    return state < sizeof name / sizeof name[0] ? name[state] : "?";
}

void mr_actors_dump(const struct mr_seg *s, FILE *f)
{
    uint64_t now = mr_now_ns();

    for (unsigned i = 0; i < s->hdr->n_actors; i++) {
        struct mr_actor_row a;

        snap(&a, &s->actors[i], sizeof a);
        fprintf(f, "actor %u %.*s on %.*s: %s, incarnation %u, pid %d, %u restarts, progress %llu%s%s", i, (int)sizeof a.name, a.name,
                (int)sizeof a.device, a.device, actor_state_name(a.state), a.incarnation, a.pid, a.restarts, (unsigned long long)a.progress,
                a.joined ? ", joined" : "", a.acked ? ", acknowledged" : "");
        if (a.wait_reason)
            fprintf(f, ", waits for %s since %.3f s", mr_wait_name((enum mr_wait_reason)a.wait_reason),
                    (double)(now - a.wait_since_ns) * 1e-9);
        fprintf(f, "\n");
    }
}

void mr_items_dump(const struct mr_seg *s, FILE *f)
{
    unsigned free_items = 0;

    for (unsigned i = 0; i < s->hdr->n_items; i++) {
        uint64_t w = mr_ld(&s->items[i].word);
        struct mr_item it;

        if (mr_w_phase(w) == MR_FREE) {
            free_items++;
            continue;
        }
        snap(&it, &s->items[i], sizeof it);
        fprintf(f, "item %u %s position %u publication %u", i, mr_phase_name((enum mr_phase)mr_w_phase(w)), mr_w_pos(w), mr_w_pub(w));
        if (mr_w_slot(w) != MR_NO_SLOT)
            fprintf(f, " by %u.%u", mr_w_slot(w), mr_w_inc(w));
        fprintf(f, ": bucket %u epoch %u, %u sequences, %u tokens", it.bucket, it.epoch, it.n_seqs, it.n_tokens);
        if (mr_w_phase(w) >= MR_READY)                   /* before that it is what an earlier microbatch left */
            fprintf(f, ", slab %u, arena %u.%llu", it.slab, it.arena, (unsigned long long)it.generation);
        fprintf(f, "\n");
    }
    fprintf(f, "items: %u of %u free\n", free_items, s->hdr->n_items);
}

void mr_ring_dump(const struct mr_seg *s, unsigned ring, FILE *f)
{
    const struct mr_ring *r = mr_ring_at(s, ring);
    struct mr_ring_walk k = mr_ring_walk(s, ring);
    unsigned shown = 0;
    uint64_t c;

    fprintf(f, "ring %u", ring);
    if (ring < MR_RING_READY)
        fprintf(f, " %s", ring == MR_RING_INPUT ? "input" : "retry");
    else
        fprintf(f, " ready bucket %u parity %u", (ring - MR_RING_READY) / 2, ring & 1);
    fprintf(f, ": head %llu tail %llu of %u cells, %u live:", (unsigned long long)mr_ld(&r->head), (unsigned long long)mr_ld(&r->tail),
            s->hdr->ring_cap, mr_ring_live(s, ring));
    while (shown++ < 16 && mr_ring_step(&k, &c))
        fprintf(f, " %u", mr_c_idx(c));
    fprintf(f, "%s\n", k.pos != k.end ? " ..." : "");
}

static const char *place_state_name(unsigned state)
{
    static const char *const name[] = {"open", "taken", "done"};

    return state < sizeof name / sizeof name[0] ? name[state] : "?";
}

static const char *ckpt_state_name(unsigned state)
{
    static const char *const name[] = {"idle", "wanted", "copying", "writing"};

    return state < sizeof name / sizeof name[0] ? name[state] : "?";
}

void mr_step_dump(const struct mr_seg *s, FILE *f)
{
    uint64_t w = mr_step_read(s), c = mr_ld(&s->hdr->ckpt);
    unsigned step = mr_sw_step(w), m = mr_step_places(s, step);

    fprintf(f, "step %u %s collective epoch %u reduced %#x applied %#x, %u places\n", step,
            mr_step_phase_name((enum mr_step_phase)mr_sw_phase(w)), mr_sw_cepoch(w), mr_sw_reduced(w), mr_sw_applied(w), m);
    for (unsigned k = 0; k < m; k++) {
        uint64_t p = mr_ld(&s->places[k].word);
        unsigned state = mr_place_state(s, step, k);

        fprintf(f, "  place %u bucket %u %s", k, mr_place_bucket(s, step, k), place_state_name(state));
        if (state != MR_PLACE_OPEN)
            fprintf(f, " by %u.%u", mr_pw_slot(p), mr_pw_inc(p));
        fprintf(f, "\n");
    }
    fprintf(f, "checkpoint %u %s", mr_pw_step(c), ckpt_state_name(mr_pw_state(c)));
    if (mr_ckpt_has_copier(c))
        fprintf(f, " by %u.%u", mr_pw_slot(c), mr_pw_inc(c));
    fprintf(f, "\n");
}

void mr_slabs_dump(const struct mr_seg *s, FILE *f)
{
    unsigned free_slabs = 0;

    for (unsigned i = 0; i < s->hdr->n_slabs; i++) {
        uint64_t w = mr_ld(&s->slabs[i].word);

        free_slabs += mr_w_slab_kind(w) == MR_SLAB_FREE;
        if (mr_w_slab_kind(w) == MR_SLAB_TARGET)
            fprintf(f, "slab %u target %u.%u\n", i, mr_w_slab_slot(w), mr_w_slab_inc(w));
        else if (mr_w_slab_kind(w) == MR_SLAB_ITEM)
            fprintf(f, "slab %u item %u position %u\n", i, mr_w_slab_idx(w), mr_w_slab_pos(w));
        else if (w)
            fprintf(f, "slab %u damaged word %016llx\n", i, (unsigned long long)w);
    }
    fprintf(f, "slabs: %u of %u free\n", free_slabs, s->hdr->n_slabs);
}

void mr_arenas_dump(const struct mr_seg *s, FILE *f)
{
    static const char *const use[] = {"slabs", "weights", "drafter", "header"}, *const kind[] = {"shm", "cuda_ipc", "vmm"};

    for (unsigned i = 0; i < s->hdr->n_arenas; i++) {
        struct mr_arena_row a;

        snap(&a, &s->arenas[i], sizeof a);
        fprintf(f, "arena %u %s of %u on device %u: %s, %llu bytes, generation %llu (last %llu)\n", i,
                a.use < MR_ARENA_USES ? use[a.use] : "?", a.owner, a.device, a.export_kind <= MR_EXPORT_VMM ? kind[a.export_kind] : "?",
                (unsigned long long)a.bytes,
                (unsigned long long)a.generation, (unsigned long long)a.last_generation);
        if (mr_w_seal_kind(a.seal) == MR_SEAL_LOADING)
            fprintf(f, "  being loaded by slot %u, incarnation %u\n", mr_w_slab_slot(a.seal), mr_w_slab_inc(a.seal));
        else if (mr_w_seal_kind(a.seal) == MR_SEAL_SEALED)
            fprintf(f, "  sealed, fingerprint %016llx\n", (unsigned long long)a.fingerprint);
    }
}

void mr_dump_all(const struct mr_seg *s, FILE *f)
{
    mr_seg_dump(s, f);
    mr_actors_dump(s, f);
    mr_items_dump(s, f);
    for (unsigned i = 0; i < mr_ring_count(s); i++)
        mr_ring_dump(s, i, f);
    mr_step_dump(s, f);
    mr_slabs_dump(s, f);
    mr_arenas_dump(s, f);
}
