/* A process may leave at any time while cuBLAS is being loaded beside it (kernels/cuda/blas.cu), also with nothing done yet: its exit code is
 * its own.  Needs the library, no GPU. */
#include <cstdio>
#include <cstdlib>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda/ctx.cuh"

enum { OWN_CODE = 2, STEP_US = 4000, STEPS = 20 };

static int leave_after(unsigned us)
{
    pid_t pid = fork();
    int status = -1;

    if (pid == 0) {
        mr_cuda_blas_open();
        usleep(us);
        mr_cuda_blas_wait();           /* as mr_k_cuda_destroy does */
        exit(OWN_CODE);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != OWN_CODE) {
        fprintf(stderr, "after %u us: wait status %#x\n", us, (unsigned)status);
        return 1;
    }
    return 0;
}

int main(void)
{
    int failed = 0;

    for (unsigned i = 0; i < STEPS; i++)
        failed += leave_after(i * STEP_US);
    return failed != 0;
}
