// SPDX-License-Identifier: Apache-2.0
// What a monitor may still do once its guest runs: nothing but run it. See docs/threat-model.md.
//
// Two steps. jail_enter(), when all files are open and before there are other threads: namespaces
// of its own, the machine's folder as the root (read-only but for run/), landlock, no capabilities,
// limits. Then each thread, and the process that writes a snapshot, calls jail_thread() before it
// does its work: from then on a system call that is not in the table (jail_calls.c) ends the
// process, and says which call it was and who made it.
#ifndef MAYFLY_JAIL_H
#define MAYFLY_JAIL_H

#include <linux/filter.h>

#include "vmm/base/err.h"

// Who calls. A new kind of thread: a name here and in jail_kind_names, a bit in the table's rows.
enum jail_kind {
	JAIL_LOOP, // devices, control socket
	JAIL_VCPU,
	JAIL_LAZY, // reads guest memory when it is wanted
	JAIL_SAVE, // the forked process that writes a snapshot
	JAIL_KINDS,
};

extern const char *const jail_kind_names[JAIL_KINDS];

// The pieces that a host may lack; a machine starts without them.
enum jail_piece {
	JAIL_USER_NS = 1 << 0,
	JAIL_NAMESPACES = 1 << 1, // mount, network, IPC, UTS, cgroup
	JAIL_ROOT = 1 << 2, // the machine's folder as the root
	JAIL_LANDLOCK = 1 << 3,
	JAIL_SECCOMP = 1 << 4,
	JAIL_PIECES = (1 << 5) - 1,
};

struct jail_params {
	// The machine's folder and its run/: they are replaced by the same ones within the jail,
	// and run/ becomes the working directory.
	int dir_fd, run_fd;
	bool writable; // the folder as a whole, for disks' layers; never its vm.ini
	int status_fd; // where violations are reported as an event, or -1: to stderr
};

// Returns the pieces that are missing on this host, or a negative errno: nobody is to run then.
int jail_enter(const struct jail_params *params, struct err *err);

// The calling thread's system calls, from now on. Does nothing where there is no seccomp.
int jail_thread(enum jail_kind kind, struct err *err);

// --- The table -------------------------------------------------------------------------------

// What has to hold for the argument arg of a call.
enum jail_check {
	JAIL_ANY,
	JAIL_EQUALS, // value, in its low 32 bits; several rows of a call are alternatives
	JAIL_WITHOUT, // none of the bits of value
	JAIL_SELF, // this process's id
};

struct jail_rule {
	int nr; // __NR_*
	unsigned int kinds; // JAIL_FOR(kind) ored
	enum jail_check check;
	unsigned int arg;
	uint32_t value;
	enum jail_when {
		JAIL_ALWAYS, // a machine that does all that machines do makes it
		JAIL_RARE, // only in a failure, or after a stop: no test can count on it
		JAIL_EMULATED, // on hosts that emulate ring 0
	} when;
	const char *name, *why;
};

#define JAIL_FOR(kind) (1U << (kind))

extern const struct jail_rule jail_rules[];
extern const unsigned int jail_nr_rules;

#define JAIL_PROGRAM_MAX 1024U

// The filter of a kind of caller, for the process pid: allowed, or SIGSYS. Returns its length.
unsigned int jail_program(
	enum jail_kind kind, int pid, struct sock_filter ret_program[JAIL_PROGRAM_MAX]);

// "openat", or "call 1234" in text where the number has no name.
const char *jail_call_name(int nr, char text[16]);

#endif
