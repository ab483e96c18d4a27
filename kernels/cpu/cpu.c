/* The cpu backend: contexts, memory, and the table of operations.
 *
 * Activations are f32, "device" memory is ordinary memory, every call has completed when it returns.  Matrix products (also those inside
 * attention and the loss) go to oneDNN or a CBLAS (gemm.c); everything else is row loops compiled for several instruction sets (isa.h),
 * picked here by a look at the processor.
 * Limits: row loops are single-threaded; `threads` reaches the products only.  Same bits from run to run on one machine with one library.
 */
#include "kernels/cpu/cpu_pvt.h"

#include <stdlib.h>

#define ALIGN 256

static void *cpu_alloc(struct mr_k *k, size_t bytes)
{
    size_t n = (bytes + ALIGN) & ~(size_t)(ALIGN - 1);       /* at least one more byte: alloc(0) is not NULL */
    void *p;

    (void)k;
    if (n < bytes)
        return NULL;
    p = aligned_alloc(ALIGN, n);
    if (p)
        memset(p, 0, n);
    return p;
}

static void cpu_release(struct mr_k *k, void *p)
{
    (void)k;
    free(p);
}

static int cpu_copy(struct mr_k *k, void *dst, const void *src, size_t bytes)
{
    (void)k;
    if (bytes)
        memmove(dst, src, bytes);
    return 0;
}

static int cpu_zero(struct mr_k *k, void *p, size_t bytes)
{
    (void)k;
    if (bytes)
        memset(p, 0, bytes);
    return 0;
}

static int cpu_sync(struct mr_k *k)
{
    (void)k;
    return 0;
}

static int cpu_to_act(struct mr_k *k, void *dst, const float *src, size_t n)
{
    return cpu_copy(k, dst, src, n * sizeof(*src));
}

static int cpu_from_act(struct mr_k *k, float *dst, const void *src, size_t n)
{
    return cpu_copy(k, dst, src, n * sizeof(*dst));
}

static const struct mr_k_ops cpu_ops = {
    .name = "cpu",
    .alloc = cpu_alloc,
    .release = cpu_release,
    .h2d = cpu_copy,
    .d2h = cpu_copy,
    .d2d = cpu_copy,
    .zero = cpu_zero,
    .sync = cpu_sync,
    .load = mr_kc_load,
    .f32_to_act = cpu_to_act,
    .act_to_f32 = cpu_from_act,
    .linear = mr_kc_linear,
    .linear_dx = mr_kc_linear_dx,
    .linear_dw = mr_kc_linear_dw,
    .embed = mr_kc_embed,
    .rmsnorm = mr_kc_rmsnorm,
    .add_rmsnorm = mr_kc_add_rmsnorm,
    .head_norm_rope = mr_kc_head_norm_rope,
    .attn_causal = mr_kc_attn_causal,
    .swiglu = mr_kc_swiglu,
    .linear_swiglu = mr_kc_linear_swiglu,
    .copy2d = mr_kc_copy2d,
    .gather = mr_kc_gather,
    .scatter_add = mr_kc_scatter_add,
    .attn_block = mr_kc_attn_block,
    .attn_block_bwd = mr_kc_attn_block_bwd,
    .rmsnorm_bwd = mr_kc_rmsnorm_bwd,
    .head_norm_rope_bwd = mr_kc_head_norm_rope_bwd,
    .swiglu_bwd = mr_kc_swiglu_bwd,
    .add = mr_kc_add,
    .ce = mr_kc_ce,
    .ce_scratch = mr_kc_ce_scratch,
    .sumsq = mr_kc_sumsq,
    .sum = mr_kc_sum,
    .adamw = mr_kc_adamw,
};

#if defined(__x86_64__)
static int has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

static int has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
#endif

/* The widest that this processor has, or the one of that name; NULL: not here. */
static const struct mr_kc_isa *find_isa(const char *name)
{
#if defined(__x86_64__)
    if (has_avx512() && (!name || !strcmp(name, mr_kc_isa_avx512.name)))
        return &mr_kc_isa_avx512;
    if (has_avx2() && (!name || !strcmp(name, mr_kc_isa_avx2.name)))
        return &mr_kc_isa_avx2;
#endif
    return !name || !strcmp(name, mr_kc_isa_base.name) ? &mr_kc_isa_base : NULL;
}

int mr_k_cpu_set_isa(struct mr_k *k, const char *name)
{
    const struct mr_kc_isa *isa = find_isa(name);

    if (!isa)
        return -ENOTSUP;
    mr_kc(k)->isa = isa;
    return 0;
}

const struct mr_kc_isa *mr_k_cpu_isa(struct mr_k *k)
{
    return mr_kc(k)->isa;
}

struct mr_k *mr_k_cpu_create(int threads)
{
    struct mr_k *k = calloc(1, sizeof(*k));
    struct mr_kc *c = calloc(1, sizeof(*c));

    if (!k || !c) {
        free(k);
        free(c);
        return NULL;
    }
    c->isa = find_isa(NULL);
    c->threads = threads < 1 ? 1 : threads;
    mr_kc_gemm_init(c);
    *k = (struct mr_k){.op = &cpu_ops, .act_bytes = 4, .act = MR_K_F32, .deterministic = 1, .impl = c};
    return k;
}

void mr_k_cpu_destroy(struct mr_k *k)
{
    if (!k)
        return;
    free(mr_kc(k)->scratch);
    free(k->impl);
    free(k);
}

float *mr_kc_scratch(struct mr_kc *c, size_t n)
{
    float *p;

    if (n <= c->scratch_n)
        return c->scratch;
    n = mr_kc_pad(n + n / 2);            /* half more than asked: a few calls of growing size do not each allocate */
    p = aligned_alloc(64, n * sizeof(*p));
    if (!p)
        return NULL;
    free(c->scratch);
    c->scratch = p;
    c->scratch_n = n;
    return p;
}
