/* A tap: lets the golden programs and tests look at activations inside a forward pass.  Models call it only when it is set, so that
 * training pays one test of a pointer. */
#ifndef MR_ACTORS_TAP_H
#define MR_ACTORS_TAP_H

/* `x` (rows, cols) is activation memory of the model's backend, valid during the call.  `layer` is -1 where the name says it all.
 * Rows are those of the tensor named: tokens of the microbatch, or block rows from `first_row` on (drafters compute in chunks).
 * A return value other than 0 ends the forward pass with it. */
struct mr_tap {
    int (*see)(void *ctx, const char *what, int layer, int first_row, const void *x, int rows, int cols);
    void *ctx;
};

static inline int mr_tap_see(const struct mr_tap *t, const char *what, int layer, int first_row, const void *x, int rows, int cols)
{
    return t && t->see ? t->see(t->ctx, what, layer, first_row, x, rows, cols) : 0;
}

#endif
