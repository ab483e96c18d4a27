/* Coroutines for the explorer: a switch is a few instructions on x86-64, swapcontext elsewhere. */
#ifndef TEST_WEAK_COROUTINE_H
#define TEST_WEAK_COROUTINE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)

struct coroutine {
    void *sp;
};

/* Callee-saved registers go onto the old stack, the new stack gives its own.  One file defines COROUTINE_CODE. */
void coroutine_swap(void **save, void *sp);
#ifdef COROUTINE_CODE
__asm__(".text\n.globl coroutine_swap\n.type coroutine_swap,@function\ncoroutine_swap:\n"
        "push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
        "mov %rsp, (%rdi); mov %rsi, %rsp\n"
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret\n"
        ".globl coroutine_entry\n.type coroutine_entry,@function\ncoroutine_entry:\n"
        "mov %r12, %rdi; call *%r13; ud2\n");
#endif
extern char coroutine_entry[];

static inline void coroutine_make(struct coroutine *c, char *stack, size_t n, void (*fn)(void *), void *arg)
{
    uint64_t *sp = (uint64_t *)((uintptr_t)(stack + n) & ~(uintptr_t)15);

    *--sp = 0;
    *--sp = 0;                                   /* 16-byte alignment at the call in coroutine_entry */
    *--sp = (uint64_t)(uintptr_t)coroutine_entry;
    *--sp = 0;                                   /* rbp */
    *--sp = 0;                                   /* rbx */
    *--sp = (uint64_t)(uintptr_t)arg;            /* r12 */
    *--sp = (uint64_t)(uintptr_t)fn;             /* r13 */
    *--sp = 0;
    *--sp = 0;
    c->sp = sp;
}

static inline void coroutine_switch(struct coroutine *from, struct coroutine *to) { coroutine_swap(&from->sp, to->sp); }

#else

#include <ucontext.h>

struct coroutine {
    ucontext_t c;
};

static void (*coroutine_fn)(void *);
static void *coroutine_arg;
static void coroutine_first(void) { coroutine_fn(coroutine_arg); }

/* Entered at its first switch: fn is the same for all, arg goes through the context. */
static inline void coroutine_go(uint32_t hi, uint32_t lo)
{
    coroutine_arg = (void *)(((uintptr_t)hi << 16 << 16) | lo);
    coroutine_first();
}

static inline void coroutine_make(struct coroutine *c, char *stack, size_t n, void (*fn)(void *), void *arg)
{
    uintptr_t a = (uintptr_t)arg;

    coroutine_fn = fn;
    getcontext(&c->c);
    c->c.uc_stack.ss_sp = stack;
    c->c.uc_stack.ss_size = n;
    c->c.uc_link = NULL;
    makecontext(&c->c, (void (*)(void))coroutine_go, 2, (uint32_t)(a >> 16 >> 16), (uint32_t)a);
}

static inline void coroutine_switch(struct coroutine *from, struct coroutine *to) { swapcontext(&from->c, &to->c); }

#endif
#endif
