/* The row loops for whatever the compiler targets by default: 4 lanes (SSE2, NEON, or plain loops). */
#define MR_KC_ISA mr_kc_isa_base
#define MR_KC_ISA_NAME "base"
#include "kernels/cpu/isa_body.h"
