/* The row loops for AVX2 with fused multiply-add: 8 lanes. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,bmi2")
#define MR_KC_ISA mr_kc_isa_avx2
#define MR_KC_ISA_NAME "avx2"
#include "kernels/cpu/isa_body.h"
#else
typedef int mr_kc_no_avx2;       /* not an empty translation unit */
#endif
