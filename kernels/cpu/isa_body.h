/* Everything of one instruction set, in the including file's target.  MR_KC_ISA names the table. */
#include "kernels/cpu/isa.h"
#include "kernels/cpu/body_norm.h"
#include "kernels/cpu/body_act.h"
#include "kernels/cpu/body_optim.h"

const struct mr_kc_isa MR_KC_ISA = {
    .name = MR_KC_ISA_NAME,
    .exp = exp_, .dot = dot_, .scale = scale_, .add = add_,
    .rmsnorm = rmsnorm_, .add_rmsnorm = add_rmsnorm_, .rmsnorm_bwd = rmsnorm_bwd_,
    .head_norm_rope = head_norm_rope_, .head_norm_rope_bwd = head_norm_rope_bwd_,
    .swiglu = swiglu_, .swiglu_bwd = swiglu_bwd_,
    .softmax = softmax_, .softmax_bwd = softmax_bwd_, .ce = ce_,
    .sumsq = sumsq_, .sum = sum_, .adamw = adamw_,
};
