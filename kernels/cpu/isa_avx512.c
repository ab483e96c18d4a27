/* The row loops for AVX-512: 16 lanes. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,bmi2")
#define MR_KC_ISA mr_kc_isa_avx512
#define MR_KC_ISA_NAME "avx512"
#include "kernels/cpu/isa_body.h"
#else
typedef int mr_kc_no_avx512;     /* not an empty translation unit */
#endif
