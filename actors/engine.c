/* Which engine a slot computes with: the topology says it. */
#include "actors/actors.h"

static int create_target(struct mr_target_engine *e, struct mr_env *env, const struct mr_topology *t, const struct mr_checked *c,
                         unsigned slot, struct mr_err *err)
{
    if (t->actor[slot].engine == MR_ENGINE_SYNTHETIC)
        return mr_synthetic_target_create(e, t, slot, err);
    return mr_model_target_create(e, env, t, c, slot, err);
}

int mr_target_engine_create(struct mr_target_engine *e, const struct mr_topology *t, const struct mr_checked *c, unsigned slot,
                            struct mr_err *err)
{
    return create_target(e, NULL, t, c, slot, err);
}

int mr_target_engine_open(struct mr_target_engine *e, struct mr_env *env, struct mr_err *err)
{
    return create_target(e, env, env->topo, env->checked, env->slot, err);
}

static int create_drafter(struct mr_drafter_engine *e, struct mr_env *env, const struct mr_topology *t, const struct mr_checked *c,
                          unsigned slot, struct mr_err *err)
{
    if (t->actor[slot].engine == MR_ENGINE_SYNTHETIC)
        return mr_synthetic_drafter_create(e, t, &c->layout, slot, err);
    return mr_model_drafter_create(e, env, t, c, slot, err);
}

int mr_drafter_engine_create(struct mr_drafter_engine *e, const struct mr_topology *t, const struct mr_checked *c, unsigned slot,
                             struct mr_err *err)
{
    return create_drafter(e, NULL, t, c, slot, err);
}

int mr_drafter_engine_open(struct mr_drafter_engine *e, struct mr_env *env, struct mr_err *err)
{
    return create_drafter(e, env, env->topo, env->checked, env->slot, err);
}
