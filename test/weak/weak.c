/* Drives the explorer: all scenarios with the real orders, which must pass, then mutants of the orders, which must be caught.
 *
 * Usage: weak [--sites] [--budget N] [part of a scenario's name]
 *   --budget N  executions of a scenario depth first, and at most of a mutant in it
 *   --sites     also weakens every acquire and release of every call site by itself, and says which scenario notices (minutes)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/weak/explore.h"

extern const struct mw_scenario litmus_scenarios[], item_scenarios[], step_scenarios[], wait_scenarios[];
static const struct mw_scenario *const groups[] = {litmus_scenarios, item_scenarios, step_scenarios, wait_scenarios};

enum { BUDGET = 60000, WALKS = 20000, MUTANT_BUDGET = 20000, MUTANT_WALKS = 5000 };

static uint64_t budget = BUDGET;
static const char *only;

static const struct mw_scenario *scenario(unsigned n)
{
    for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++)
        for (const struct mw_scenario *s = groups[g]; s->name; s++)
            if (n-- == 0)
                return s;
    return NULL;
}

static int wanted(const struct mw_scenario *s) { return !only || strstr(s->name, only); }

static int run_all(void)
{
    const struct mw_scenario *s;
    int wrong = 0;

    printf("| scenario | threads | executions | to the end | events | search | result |\n|---|---|---|---|---|---|---|\n");
    for (unsigned i = 0; (s = scenario(i)); i++) {
        struct mw_result r;
        int ok;

        if (!wanted(s))
            continue;
        r = mw_explore(s, NULL, budget, WALKS, 1);
        ok = s->must_fail ? r.failed : !r.failed && r.finished;
        printf("| %s | %u | %llu | %llu | %llu | %s | %s |\n", s->name, s->n_threads, (unsigned long long)r.executions,
               (unsigned long long)r.finished, (unsigned long long)r.events, r.complete ? "complete" : r.failed ? "until found" : "bounded",
               !ok ? "WRONG" : s->must_fail ? "caught" : "ok");
        if (r.failed)
            printf("  %s\n", r.why);
        fflush(stdout);
        wrong += !ok;
    }
    return wrong;
}

/* The first scenario that fails with this mutant, or NULL. */
static const struct mw_scenario *caught_by(const struct mw_mutant *m, struct mw_result *r)
{
    const struct mw_scenario *s;

    for (unsigned i = 0; (s = scenario(i)); i++) {
        if (s->must_fail || !wanted(s))
            continue;
        *r = mw_explore(s, m, budget < MUTANT_BUDGET ? budget : MUTANT_BUDGET, MUTANT_WALKS, 1);
        if (r->failed)
            return s;
    }
    return NULL;
}

/* The named edges: what is taken away must be noticed. */
static const struct {
    const char *location, *edge;
    int weaken;
} edges[] = {
    {"item word", "E1, E2, E4: publication and claim", MW_RELEASE},
    {"item word", "E1, E2, E4: publication and claim", MW_ACQUIRE},
    {"slab word", "E4: hidden states read, slab taken again", MW_RELEASE},
    {"slab word", "E4: hidden states read, slab taken again", MW_ACQUIRE},
    {"place word", "E5: record and accumulator, place DONE", MW_RELEASE},
    {"place word", "E5: record and accumulator, place DONE", MW_ACQUIRE},
    {"joined flag", "E5: accumulator zeroed, joined", MW_RELEASE},
    {"joined flag", "E5: accumulator zeroed, joined", MW_ACQUIRE},
    {"step word", "E3, E4: sums, applied, next step", MW_RELEASE},
    {"step word", "E3, E4: sums, applied, next step", MW_ACQUIRE},
    {"ledger_done", "records read, slots used again", MW_RELEASE},
    {"ledger_done", "records read, slots used again", MW_ACQUIRE},
    {"plan epoch", "plan sealed", MW_RELEASE},
    {"plan epoch", "plan sealed", MW_ACQUIRE},
    {"arena generation", "arena registered", MW_RELEASE},
    {"arena generation", "arena registered", MW_ACQUIRE},
    {"ring cell", "the item word is published before its cell", MW_RELEASE},
    {"ring cell", "the item word is published before its cell", MW_ACQUIRE},
    {"event count", "W1: change, bump", MW_RELEASE},
    {"event count", "W1: change, bump", MW_ACQUIRE},
};

static int run_edges(void)
{
    int missed = 0;

    printf("\n| location | edge | weakened | caught by | how |\n|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        const struct mw_mutant m = {.location = edges[i].location, .weaken = edges[i].weaken};
        struct mw_result r = {0};
        const struct mw_scenario *s = caught_by(&m, &r);

        printf("| %s | %s | %s | %s | %s |\n", edges[i].location, edges[i].edge, m.weaken == MW_RELEASE ? "release" : "acquire",
               s ? s->name : "NOBODY", s ? r.why : "");
        fflush(stdout);
        missed += !s;
    }
    return missed;
}

/* Every call site by itself. */
static void run_sites(const char *self)
{
    static struct mw_site site[512];
    const struct mw_site *list;
    unsigned n = mw_sites(&list);

    memcpy(site, list, n * sizeof site[0]);
    for (unsigned i = 0; i < n; i++) {
        for (int weaken = MW_ACQUIRE; weaken <= MW_RELEASE; weaken++) {
            const struct mw_mutant m = {.site = site[i].at, .weaken = weaken};
            struct mw_result r = {0};
            const struct mw_scenario *s;
            char cmd[512];

            if (!(site[i].can & weaken))
                continue;
            s = caught_by(&m, &r);
            printf("%-18s %-8s %-46s ", site[i].location, weaken == MW_RELEASE ? "release" : "acquire", s ? s->name : "-");
            fflush(stdout);
            snprintf(cmd, sizeof cmd, "addr2line -s -f -e %s %#zx | paste -sd' '", self, (size_t)site[i].at - 1);
            if (system(cmd))
                printf("%p\n", site[i].at);
        }
    }
}

int main(int argc, char **argv)
{
    int wrong, sites = 0;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--budget") == 0 && i + 1 < argc)
            budget = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--sites") == 0)
            sites = 1;
        else
            only = argv[i];
    }
    wrong = run_all();
    if (sites)
        run_sites(argv[0]);
    else if (!only)
        wrong += run_edges();
    return wrong != 0;
}
