// SPDX-License-Identifier: Apache-2.0
// Runs in a guest: two processes of two threads each keep vector state of their own live (AVX, and
// AVX-512 with its mask registers where there is such; MXCSR and the x87 control word too) across
// blocking reads, sched_yield(), timer ticks and signals, and verify it after each. Static, libc
// alone. Prints one line:
//   avx ok samples=N avx512=0|1      exit 0
//   avx corrupt: ...                 exit 1, what was found where
//   avx unavailable: ...             exit 2
// Counts are chosen for a host on which a system call takes 250 us and a switch some ms: 5 s there.
#include <cpuid.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WORKERS      4 // 0 and 1 are threads of the parent, 2 and 3 of the child
#define RING_ROUNDS  25
#define YIELDS       40
#define SPINS        10
#define SPIN_NS      25000000ULL // more than two ticks of a 100 Hz kernel
#define SIGNALS      15
#define SAMPLES      (2 * RING_ROUNDS + YIELDS + SPINS + SIGNALS) // of a worker
#define TIMEOUT_SECS 120

struct vector_state {
	_Alignas(64) uint8_t reg[32][64]; // of a ymm register, the first half
	uint64_t mask[8];
	uint32_t mxcsr;
	uint16_t fcw;
};

static struct {
	atomic_uint samples;
	atomic_bool failed;
	char text[160]; // of the first failure
} * shared;

static bool avx512;
static uint64_t spin_tsc;
static int pipes[WORKERS][2]; // worker i waits for a byte in pipe i and passes it on

#define REGS_16 "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15"
#define REGS_32 REGS_16 ",16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31"
#define EACH(regs, insn)                  \
	".irp n," regs "\n\t" insn "\n\t" \
	".endr\n\t"

#define LOAD_AVX EACH(REGS_16, "vmovdqu \\n*64(%[in]), %%ymm\\n")
#define SAVE_AVX EACH(REGS_16, "vmovdqu %%ymm\\n, \\n*64(%[out])")
#define LOAD_AVX512                                        \
	EACH(REGS_32, "vmovdqu64 \\n*64(%[in]), %%zmm\\n") \
	EACH("0,1,2,3,4,5,6,7", "kmovq 2048+\\n*8(%[in]), %%k\\n")
#define SAVE_AVX512                                         \
	EACH(REGS_32, "vmovdqu64 %%zmm\\n, \\n*64(%[out])") \
	EACH("0,1,2,3,4,5,6,7", "kmovq %%k\\n, 2048+\\n*8(%[out])")
#define LOAD_CONTROL "ldmxcsr 2112(%[in])\n\tfldcw 2116(%[in])\n\t"
#define SAVE_CONTROL "stmxcsr 2112(%[out])\n\tfnstcw 2116(%[out])\n\t"

_Static_assert(offsetof(struct vector_state, mask) == 2048, "see above");
_Static_assert(offsetof(struct vector_state, mxcsr) == 2112, "see above");
_Static_assert(offsetof(struct vector_state, fcw) == 2116, "see above");

#define VECTOR_CLOBBERS                                                                         \
	"memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
		"xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

// Loads the state, makes a system call, spins to a time stamp, and writes the state down: nothing
// between touches a vector register.
#define LIVE(load, save)                                                                         \
	__asm__ volatile("stmxcsr %[mxcsr]\n\tfnstcw %[fcw]\n\t" LOAD_CONTROL load "syscall\n\t" \
			 "mov %%rax, %%r9\n\t"                                                   \
			 "1: rdtsc\n\t"                                                          \
			 "shl $32, %%rdx\n\t"                                                    \
			 "or %%rdx, %%rax\n\t"                                                   \
			 "cmp %[until], %%rax\n\t"                                               \
			 "jb 1b\n\t" save SAVE_CONTROL "vzeroupper\n\t"                          \
			 "ldmxcsr %[mxcsr]\n\tfldcw %[fcw]\n\t"                                  \
			 "mov %%r9, %%rax\n\t"                                                   \
			 : "+a"(ret), "+d"(c), [mxcsr] "+m"(mxcsr), [fcw] "+m"(fcw)              \
			 : "D"(a), "S"(b), [in] "r"(in), [out] "r"(out), [until] "r"(until_tsc)  \
			 : "rcx", "r9", "r11", VECTOR_CLOBBERS)

static long live(const struct vector_state *in, struct vector_state *out, uint64_t until_tsc,
	long nr, long a, long b, long c)
{
	uint32_t mxcsr = 0;
	uint16_t fcw = 0;
	long ret = nr;

	if (avx512)
		LIVE(LOAD_AVX512, SAVE_AVX512);
	else
		LIVE(LOAD_AVX, SAVE_AVX);
	return ret;
}

// What a handler leaves in the registers must not be seen by whom it interrupted.
static void on_signal(int signo)
{
	static const struct vector_state in = {
		.reg = {[0 ... 31] = {[0 ... 63] = 0xee}}, .mask = {[0 ... 7] = ~0ULL}};

	(void)signo;
	if (avx512)
		__asm__ volatile(LOAD_AVX512 "vzeroupper" ::[in] "r"(&in) : VECTOR_CLOBBERS);
	else
		__asm__ volatile(LOAD_AVX "vzeroupper" ::[in] "r"(&in) : VECTOR_CLOBBERS);
}

static uint64_t mix(uint64_t z)
{
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

static void fill(struct vector_state *state, unsigned int worker, unsigned int sample)
{
	uint64_t seed = ((uint64_t)worker + 1) << 56 | (uint64_t)sample << 24;
	uint64_t word;

	memset(state, 0, sizeof(*state));
	for (size_t off = 0; off < sizeof(state->reg); off += 8) {
		word = mix(seed + off + 1);
		memcpy((uint8_t *)state->reg + off, &word, 8);
	}
	for (size_t i = 0; i < 8; i++)
		state->mask[i] = mix(seed + 0x10000 + i);
	state->mxcsr = 0x1f80 | (worker & 3U) << 13; // the rounding mode
	state->fcw = (uint16_t)(0x37f | (worker & 3U) << 10);
}

static void fail(const char *what, unsigned int worker, unsigned int sample, size_t reg)
{
	if (!atomic_exchange(&shared->failed, true))
		snprintf(shared->text, sizeof(shared->text), "%s: worker %u sample %u register %zu",
			what, worker, sample, reg);
}

static void verify(const struct vector_state *in, const struct vector_state *out, const char *what,
	unsigned int worker, unsigned int sample)
{
	size_t bytes = avx512 ? 64 : 32;

	for (size_t i = 0; i < (avx512 ? 32 : 16); i++)
		if (memcmp(in->reg[i], out->reg[i], bytes) != 0)
			fail(what, worker, sample, i);
	for (size_t i = 0; avx512 && i < 8; i++)
		if (in->mask[i] != out->mask[i])
			fail(what, worker, sample, 100 + i);
	if (in->mxcsr != out->mxcsr)
		fail(what, worker, sample, 200);
	if (in->fcw != out->fcw)
		fail(what, worker, sample, 201);
	atomic_fetch_add(&shared->samples, 1);
}

struct worker {
	unsigned int id;
	unsigned int sample;
};

static void sample(
	struct worker *w, const char *what, long want, bool spin, long nr, long a, long b, long c)
{
	struct vector_state in, out;
	uint64_t until = spin ? __builtin_ia32_rdtsc() + spin_tsc : 0;
	long r;

	fill(&in, w->id, w->sample);
	memset(&out, 0, sizeof(out));
	r = live(&in, &out, until, nr, a, b, c);
	if (r != want)
		fail("a system call failed", w->id, w->sample, (size_t)-r);
	verify(&in, &out, what, w->id, w->sample++);
}

static void *work(void *arg)
{
	struct worker *w = arg;
	long to = pipes[(w->id + 1) % WORKERS][1], from = pipes[w->id][0];
	long pid = getpid(), tid = syscall(SYS_gettid);
	char byte = 0;

	for (unsigned int i = 0; i < RING_ROUNDS; i++) {
		if (w->id == 0)
			sample(w, "write", 1, false, SYS_write, to, (long)&byte, 1);
		sample(w, "read", 1, false, SYS_read, from, (long)&byte, 1);
		if (w->id != 0)
			sample(w, "write", 1, false, SYS_write, to, (long)&byte, 1);
	}
	for (unsigned int i = 0; i < YIELDS; i++)
		sample(w, "sched_yield", 0, false, SYS_sched_yield, 0, 0, 0);
	for (unsigned int i = 0; i < SPINS; i++)
		sample(w, "timer ticks", 0, true, SYS_sched_yield, 0, 0, 0);
	for (unsigned int i = 0; i < SIGNALS; i++)
		sample(w, "signal", 0, false, SYS_tgkill, pid, tid, SIGUSR1);
	return NULL;
}

// Two workers of this process.
static void work_in_two_threads(unsigned int first_id)
{
	struct worker workers[2] = {{.id = first_id}, {.id = first_id + 1}};
	pthread_t thread;

	if (pthread_create(&thread, NULL, work, &workers[1]) != 0) {
		fail("pthread_create failed", first_id, 0, 0);
		return;
	}
	work(&workers[0]);
	pthread_join(thread, NULL);
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
}

static void calibrate(void)
{
	uint64_t ns = now_ns(), tsc = __builtin_ia32_rdtsc(), elapsed_ns;

	while ((elapsed_ns = now_ns() - ns) < SPIN_NS)
		;
	spin_tsc = (__builtin_ia32_rdtsc() - tsc) * SPIN_NS / elapsed_ns;
}

// The bits of XCR0, or 0 if AVX cannot be used.
static uint32_t avx_state(void)
{
	uint32_t eax, ebx, ecx = 0, edx;

	if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE) || !(ecx & bit_AVX))
		return 0;
	__asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
	return (eax & 6) == 6 ? eax : 0;
}

int main(void)
{
	struct sigaction act = {.sa_handler = on_signal};
	uint32_t xcr0 = avx_state(), eax, ebx = 0, ecx, edx;
	cpu_set_t cpu;
	pid_t child;
	int status = 0;

	if (!xcr0) {
		printf("avx unavailable: by CPUID or XCR0\n");
		return 2;
	}
	__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
	avx512 = (ebx & bit_AVX512F) && (ebx & bit_AVX512BW) && (xcr0 & 0xe0) == 0xe0;

	alarm(TIMEOUT_SECS);
	sigaction(SIGUSR1, &act, NULL);
	// All on one CPU, so that each switch is from one worker to another.
	CPU_ZERO(&cpu);
	CPU_SET(sched_getcpu(), &cpu);
	sched_setaffinity(0, sizeof(cpu), &cpu);
	calibrate();
	shared = mmap(
		NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		return 2;
	for (unsigned int i = 0; i < WORKERS; i++)
		if (pipe(pipes[i]) < 0)
			return 2;

	child = fork();
	if (child < 0)
		return 2;
	alarm(TIMEOUT_SECS); // not inherited
	work_in_two_threads(child ? 0 : 2);
	if (child == 0)
		_exit(0);
	if (waitpid(child, &status, 0) != child || status != 0)
		fail("the child ended badly", 2, 0, (size_t)status);
	if (!atomic_load(&shared->failed) && atomic_load(&shared->samples) != WORKERS * SAMPLES)
		fail("samples are missing", 0, atomic_load(&shared->samples), 0);
	if (atomic_load(&shared->failed)) {
		printf("avx corrupt: %s\n", shared->text);
		return 1;
	}
	printf("avx ok samples=%u avx512=%d\n", atomic_load(&shared->samples), avx512);
	return 0;
}
