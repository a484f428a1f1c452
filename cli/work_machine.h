// SPDX-License-Identifier: Apache-2.0
// A machine that works on a folder of this host: what it knows of that, in the machine's folder
// work/, and what has become of it in the guest. One thread, and one more that sends.
//
//   work/target  symbolic link: the host's folder      work/base    that, as it went in
//   work/inside  symbolic link: the guest's            work/before  the guest's then
//   work/ignore  the .mayflyignore of that moment
//   work/run     symbolic link: its run id             work/history see work/history.h
#ifndef MAYFLY_CLI_WORK_MACHINE_H
#define MAYFLY_CLI_WORK_MACHINE_H

#include "cli/agent_files.h"
#include "cli/home.h"
#include "cli/running.h"
#include "work/keep.h"

struct work_machine {
	char name[HOME_NAME_MAX + 1];
	struct running m;
	char target[PATH_MAX], inside[PATH_MAX];
	int target_fd, state_fd; // owned
	struct work_ignore ignore;
	struct work_manifest base, before;
	int signal_fd; // as in struct agent_exec; -1: signals just end us
	uint64_t deadline_ns; // of what work_files() begins; 0: none
	bool progress; // on stderr
};

#define WORK_MACHINE_NONE                                         \
	{                                                         \
		.target_fd = -1, .state_fd = -1, .signal_fd = -1, \
	}

// The name of a machine for that folder: always the same.
void work_name_for(const char *target, char ret[HOME_NAME_MAX + 1]);

// That of the folder that we are in.
int work_name_here(char ret[HOME_NAME_MAX + 1], struct err *err);

// A new one: makes work/ in the machine's folder m.dir, with the folder that has been opened as
// target_fd, and inside. work_machine_in() then fills in what has gone in.
int work_machine_new(struct work_machine *w, struct err *err);

// Finds the machine of that name, which must run (-ESRCH) and have a folder (-ENOENT). Ends what
// somebody who was killed has left in that.
int work_machine_open(struct work_machine *ret, const char *name, struct err *err);
void work_machine_fini(struct work_machine *w);

// The host's folder a machine of that name works on. -ENOENT if on none.
int work_target_of(const char *dir, char ret[PATH_MAX], struct err *err);

// The folder work/ of the machine in dir: an fd, the caller's. -ENOENT if it works on no folder.
int work_state_open(const char *dir, struct err *err);

// Whether mayfly work has made the machine in dir, be it that it came to no end with that.
bool work_begun(const char *dir);

// Sends the folder in, but for what is there already: what known (NULL: nothing) tells of it.
// Fills in base.
int work_send(struct work_machine *w, const struct work_manifest *known, struct err *err);

// The tree of the guest as it is; what came in is then before. Writes both down.
int work_settle_in(struct work_machine *w, struct err *err);

// A fresh connection for files, which gives up a guest that does not go on.
int work_files(struct work_machine *w, struct agent_files *ret, struct err *err);

struct work_look {
	struct work_stage stage;
	struct work_manifest host, guest;
	struct work_trees trees;
	struct work_plan plan;
};

#define WORK_LOOK_NONE                   \
	{                                \
		.stage = WORK_STAGE_NONE \
	}

// What has changed, staged in the folder home_fd. max_bytes: of the disk.
int work_look(struct work_machine *w, int home_fd, uint64_t max_bytes, struct work_look *ret,
	struct err *err);
// The guest's tree, and the files that since does not have so, staged in home_fd and hashed, as far
// as they can be had; no plan, and nothing of the host.
int work_look_since(struct work_machine *w, int home_fd, const struct work_manifest *since,
	uint64_t max_bytes, struct work_look *ret, struct err *err);
void work_look_fini(struct work_look *look);

// What has been kept is what went in from now on.
int work_kept(struct work_machine *w, const struct work_look *look, struct err *err);

#endif
