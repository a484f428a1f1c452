// SPDX-License-Identifier: Apache-2.0
// Saving a machine and restoring it; see vm.h. Loop thread, and a child process.
//
// A save: the vCPUs park and the devices drain; the state of all of them is encoded; then the
// process forks, and the machine goes on. The child has guest memory as it was at that instant,
// copy on write, and takes its time to write it. So however large the memory and however busy the
// guest, it stands still only for as long as the fork takes, and what is written is of one moment.
//
// The order of a save and of a restore, and why:
//   save     kvm (its clock), vCPUs, platform devices, virtio devices; then memory, to which
//            none of these has anything left to write
//   restore  memory first, since devices check their queues in it; vCPUs; kvm, whose clock
//            starts to run; devices last, since they may raise interrupts
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "devices/overlay.h"
#include "devices/virtio_blk.h"
#include "devices/virtio_mmio.h"
#include "devices/virtio_vsock.h"
#include "snapshot/chain.h"
#include "snapshot/lazy.h"
#include "vmm/base/fd.h"
#include "vmm/base/log.h"
#include "vmm/machine.h"
#include "vmm/vm_private.h"

#define STATE_FILE      "state"
#define OOM_SCORE_FIRST "1000"
#define CHILD_NICE      5

// --- The state -------------------------------------------------------------------------------

#define NAME_BYTES 24

struct state {
	unsigned int nr;
	struct buf bufs[IMAGE_SECTIONS_MAX];
	char names[IMAGE_SECTIONS_MAX][NAME_BYTES];
};

_Static_assert(CONFIG_CPUS_MAX + VIRTIO_DEVICES_MAX + CONFIG_DISKS_MAX + 4 <= IMAGE_SECTIONS_MAX,
	"a section each");

static void state_fini(struct state *state)
{
	for (unsigned int i = 0; i < state->nr; i++)
		buf_fini(&state->bufs[i]);
	free(state);
}

static void cleanup_state(struct state **state)
{
	if (*state)
		state_fini(*state);
}

PRINTF_LIKE(2, 3) static struct buf *add_section(struct state *state, const char *fmt, ...)
{
	va_list ap;

	ASSERT(state->nr < IMAGE_SECTIONS_MAX);
	va_start(ap, fmt);
	vsnprintf(state->names[state->nr], NAME_BYTES, fmt, ap);
	va_end(ap);
	return &state->bufs[state->nr++];
}

static bool has_frozen(struct overlay *overlay, char ret_name[OVERLAY_NAME_BYTES])
{
	char names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];
	unsigned int nr = overlay_frozen(overlay, names);

	if (nr == 0)
		return false;
	memcpy(ret_name, names[nr - 1], OVERLAY_NAME_BYTES);
	return true;
}

// What the disks hold at this moment stays for ever, under a name.
static int freeze_disks(struct vm *vm, struct state *state, struct err *err)
{
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++) {
		enum config_disk_mode mode = vm->params.config->disks[i].mode;
		struct overlay *overlay;
		char name[OVERLAY_NAME_BYTES];
		int r;

		if (!vm->disks[i] || mode == CONFIG_DISK_RO)
			continue;
		overlay = virtio_blk_overlay(vm->disks[i]);
		if (!overlay)
			return err_set(err, -ENOTSUP,
				"%s writes to a file of the host (mode = raw), which a snapshot "
				"cannot hold",
				config_disk_name(i));
		r = overlay_freeze(overlay, err);
		if (r < 0)
			return err_wrap(err, r, "%s", config_disk_name(i));
		if (has_frozen(overlay, name))
			buf_append(add_section(state, VM_DISK_SECTION, i), name, sizeof(name));
	}
	return 0;
}

static int save_state(struct vm *vm, struct state *state, struct err *err)
{
	int r = kvm_save(&vm->kvm, add_section(state, "kvm"), err);

	for (unsigned int i = 0; i < vm->nr_vcpus && r == 0; i++)
		r = vcpu_save(vm->vcpus[i], add_section(state, "vcpu.%u", i), err);
	if (r == 0)
		r = machine_save(vm->machine, add_section(state, "machine"), err);
	for (unsigned int i = 0; i < vm->nr_virtio && r == 0; i++)
		r = virtio_dev_save(vm->virtio[i].dev, add_section(state, "virtio.%u", i));
	if (r < 0 && err && !err->code)
		return err_errno(err, r, "saving the state of the machine");
	return r;
}

// --- The child -------------------------------------------------------------------------------

struct child_result {
	int r;
	struct err err;
	struct memory_stats memory;
	uint64_t state_bytes;
};

// What is to be written, a bit a page.
static int choose_pages(struct vm *vm, bool diff, struct err *err)
{
	struct vm_saving *saving = &vm->saving;
	bool by_pages = diff && saving->changes == VM_CHANGES_PAGES;
	int r = 0;

	// Without a mapping beneath, what was read is ours alone, too, and what was not is absent.
	if (by_pages && vm->chain)
		r = chain_drop_same(vm->chain, &vm->mem, saving->pages, err);
	if (r == 0 && saving->present)
		r = chain_fill(vm->chain, &vm->mem, saving->pages, saving->present, err);
	return r;
}

static int write_state(struct vm *vm, struct state *state, struct child_result *result)
{
	const struct vm_snapshot_request *request = &vm->saving.request;
	struct image_section sections[IMAGE_SECTIONS_MAX];
	CLEANUP_BUF struct buf file = {0};
	struct err *err = &result->err;
	int r;

	for (unsigned int i = 0; i < state->nr; i++)
		sections[i] = (struct image_section){
			state->names[i], state->bufs[i].data, state->bufs[i].len};
	r = image_write(&file, &request->id, &vm->saving.result.parent, sections, state->nr, err);
	if (r < 0)
		return r;
	r = fd_write_all(request->state_fd, file.data, file.len);
	if (r == 0 && !request->unsynced && fsync(request->state_fd) < 0)
		r = -errno;
	result->state_bytes = file.len;
	return r < 0 ? err_errno(err, r, STATE_FILE) : 0;
}

static int write_memory(struct vm *vm, struct state *state, struct child_result *result)
{
	const struct vm_snapshot_request *request = &vm->saving.request;
	struct memory_save save = {
		.fd = request->memory_fd,
		.mem = &vm->mem,
		.pages = vm->saving.pages,
		.id = &request->id,
		.parent = &vm->saving.result.parent,
		.compress = request->compress,
	};
	struct err *err = &result->err;
	int r;

	if (request->live)
		return vm_live_write(vm, err);
	r = choose_pages(vm, request->diff, err);
	if (r == 0)
		r = memory_write(&save, add_section(state, MEMORY_SECTION), &result->memory, err);
	if (r == 0 && !request->unsynced && fsync(save.fd) < 0)
		r = err_errno(err, -errno, MEMORY_FILE_NAME);
	return r;
}

static int by_number(const void *a, const void *b)
{
	return *(const int *)a - *(const int *)b;
}

// What else the parent has open would be held open by us as well: its lock, and connections whose
// other end waits for them to close.
static void close_all_but(int *keep, unsigned int nr)
{
	unsigned int from = STDERR_FILENO + 1;

	qsort(keep, nr, sizeof(*keep), by_number);
	for (unsigned int i = 0; i < nr; i++) {
		if ((unsigned int)keep[i] > from)
			close_range(from, (unsigned int)keep[i] - 1, 0);
		from = (unsigned int)keep[i] + 1;
	}
	close_range(from, ~0U, 0);
}

// Never returns. Only this thread exists, and nothing of the parent's may be closed in an orderly
// way: sockets would be shut down, operations cancelled. Nothing here takes a lock that another
// thread may have held at the fork: the C library sees to those of malloc(), and there is no stdio
// and no log. It dies with the parent, whose loop thread is its first: that is what PDEATHSIG
// means.
_Noreturn static void child_main(struct vm *vm, struct state *state, int pipe_fd, pid_t parent)
{
	int keep[MEMORY_LAYERS_MAX + 3] = {0};
	struct child_result result = {0};
	unsigned int nr = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	prctl(PR_SET_NAME, "mayfly-save");
	if (vm->chain)
		chain_fds(vm->chain, keep, &nr);
	keep[nr++] = pipe_fd;
	keep[nr++] = vm->saving.request.state_fd;
	keep[nr++] = vm->saving.request.memory_fd;
	close_all_but(keep, nr);
	setpriority(PRIO_PROCESS, 0, CHILD_NICE);
	if (vm->params.confine_thread)
		result.r = vm->params.confine_thread(JAIL_SAVE, &result.err);
	if (result.r == 0)
		result.r = write_memory(vm, state, &result);
	if (result.r == 0)
		result.r = write_state(vm, state, &result);
	_exit(fd_write_all(pipe_fd, &result, sizeof(result)) < 0);
}

// --- Saving ----------------------------------------------------------------------------------

static void reap(struct vm_saving *saving)
{
	int status;

	if (saving->child <= 0)
		return;
	while (waitpid(saving->child, &status, 0) < 0 && errno == EINTR)
		;
	saving->child = 0;
}

static void close_files(struct vm_snapshot_request *request)
{
	fd_close(&request->state_fd);
	fd_close(&request->memory_fd);
}

static void finish(struct vm *vm, int r, const struct err *err)
{
	struct vm_saving *saving = &vm->saving;

	loop_watch_del(&vm->loop, &saving->watch);
	fd_close(&saving->result_fd);
	close_files(&saving->request);
	reap(saving);
	if (r < 0)
		vm_snapshot_settle(vm, false);
	saving->request.done(saving->request.opaque, r, &saving->result, err);
}

static void take_result(struct vm *vm, const struct child_result *result)
{
	struct vm_saving *saving = &vm->saving;

	saving->result.held_pages = result->memory.held_pages;
	saving->result.written_bytes = result->memory.written_bytes;
	saving->result.state_bytes = result->state_bytes;
	finish(vm, result->r, &result->err);
}

static void on_result(void *opaque, uint32_t revents)
{
	struct vm *vm = opaque;
	struct vm_saving *saving = &vm->saving;
	struct child_result result;
	struct err err = {0};

	(void)revents;
	// It writes once, less than a pipe takes at once.
	if (read(saving->result_fd, &result, sizeof(result)) != sizeof(result)) {
		err_set(&err, -EIO, "the process that writes the snapshot was killed");
		finish(vm, -EIO, &err);
		return;
	}
	take_result(vm, &result);
}

// From now on KVM logs what the guest writes and we what we write. What was logged so far is added
// to what is carried.
int vm_log_changes(struct vm *vm, struct err *err)
{
	struct vm_saving *saving = &vm->saving;
	int r;

	if (!saving->carried) {
		saving->carried = calloc(
			guest_mem_bitmap_words(&vm->mem), sizeof(*saving->carried));
		if (!saving->carried)
			return err_errno(err, -ENOMEM, "log of changes");
	}
	if (saving->logging) {
		r = kvm_dirty_log(&vm->kvm, &vm->mem, saving->carried, err);
		if (r == 0)
			guest_mem_track_collect(&vm->mem, saving->carried);
		return r;
	}
	r = guest_mem_track_start(&vm->mem, err);
	if (r == 0)
		r = kvm_set_ram(&vm->kvm, &vm->mem, true, err);
	saving->logging = r == 0;
	return r;
}

// What the page tables know: what was touched, and what is there. The child could not ask about its
// own, since there is no /proc in the jail.
static int read_page_tables(struct vm *vm, struct err *err)
{
	struct vm_saving *saving = &vm->saving;
	const bool diff = saving->request.diff;
	const size_t words = guest_mem_bitmap_words(&vm->mem);
	int r = 0;

	saving->pages = calloc(words, sizeof(*saving->pages));
	saving->present = vm->lazy ? calloc(words, sizeof(*saving->present)) : NULL;
	if (!saving->pages || (vm->lazy && !saving->present))
		return err_errno(err, -ENOMEM, "snapshot");
	if (diff && saving->changes != VM_CHANGES_PAGES)
		memcpy(saving->pages, saving->carried, words * sizeof(*saving->pages));
	else
		r = guest_mem_touched(&vm->mem, diff, saving->pages, err);
	if (r == 0 && saving->present)
		r = guest_mem_touched(&vm->mem, true, saving->present, err);
	return r;
}

// What the guest writes while a child saves is there twice. Where that is too much it is the child
// that the kernel ends, not the machine: it inherits the score.
static void set_oom_score(const struct vm *vm, const char *score)
{
	if (vm->oom_fd >= 0)
		(void)!pwrite(vm->oom_fd, score, strlen(score), 0);
}

static int fork_child(struct vm *vm, struct state *state, struct err *err)
{
	struct vm_saving *saving = &vm->saving;
	pid_t self = getpid();
	int p[2], r;

	if (pipe2(p, O_CLOEXEC) < 0)
		return err_errno(err, -errno, "pipe");
	set_oom_score(vm, OOM_SCORE_FIRST);
	saving->child = fork();
	if (saving->child == 0)
		child_main(vm, state, p[1], self);
	set_oom_score(vm, vm->oom_score);
	fd_close(&p[1]);
	saving->result_fd = p[0];
	if (saving->child < 0) {
		saving->child = 0;
		return err_errno(err, -errno, "fork");
	}
	r = loop_watch_add(&vm->loop, saving->result_fd, POLLIN, on_result, vm, err);
	if (r >= 0)
		saving->watch = r;
	return r < 0 ? r : 0;
}

// What is to be written, from a fork or, if it is little, by this process. *ret_now: that it is.
static int choose(struct vm *vm, bool *ret_now, struct err *err)
{
	const struct vm_saving *saving = &vm->saving;
	int r = 0;

	if (saving->request.live)
		return vm_live_last(vm, ret_now, err);
	if (saving->request.track || saving->logging)
		r = vm_log_changes(vm, err);
	return r == 0 ? read_page_tables(vm, err) : r;
}

static void on_rest(void *opaque)
{
	struct vm *vm = opaque;
	struct vm_saving *saving = &vm->saving;
	CLEANUP(cleanup_state) struct state *state = calloc(1, sizeof(*state));
	struct child_result result = {0};
	bool now = false;
	int r = -ENOMEM;

	if (state)
		r = freeze_disks(vm, state, &result.err);
	else
		err_errno(&result.err, r, "snapshot");
	if (r == 0)
		r = save_state(vm, state, &result.err);
	if (r == 0)
		r = choose(vm, &now, &result.err);
	if (r == 0)
		r = now ? vm_live_write(vm, &result.err) : fork_child(vm, state, &result.err);
	free(TAKE_PTR(saving->pages));
	free(TAKE_PTR(saving->present));
	if (!saving->paused && !(saving->request.hold && r == 0))
		vm_rest_end(vm);
	saving->result.blackout_ns = now_ns() - saving->rest_start_ns;
	vm_live_fini(vm);
	if (r == 0 && now)
		r = write_state(vm, state, &result);
	result.r = r;
	if (r < 0 || now)
		take_result(vm, &result);
}

// Before it stands still: what the disks have not synced takes long. What is written meanwhile is
// left for the freeze to sync.
static void sync_disks(struct vm *vm)
{
	struct vm_presync *sync = &vm->saving.presync;

	for (; sync->disk < CONFIG_DISKS_MAX && !vm->params.throwaway; sync->disk++) {
		struct overlay *overlay = vm->disks[sync->disk]
						  ? virtio_blk_overlay(vm->disks[sync->disk])
						  : NULL;

		if (!overlay)
			continue;
		sync->busy = true;
		io_uring_prep_fsync(loop_sqe(&vm->loop, &sync->op), overlay_top_fd(overlay),
			IORING_FSYNC_DATASYNC);
		return;
	}
	vm->saving.rest_start_ns = now_ns();
	vm_rest_start(vm, on_rest, vm);
}

static void on_synced(struct loop_op *op, int res)
{
	struct vm_presync *sync = container_of(op, struct vm_presync, op);
	struct vm *vm = container_of(sync, struct vm, saving.presync);
	struct err err = {0};

	sync->busy = false;
	if (res < 0) {
		// The kernel says so once: neither the freeze nor the guest would hear of it.
		virtio_blk_sync_failed(vm->disks[sync->disk]);
		err_errno(&err, res, "%s.overlay", config_disk_name(sync->disk));
		vm_live_fini(vm);
		finish(vm, res, &err);
		return;
	}
	sync->disk++;
	sync_disks(vm);
}

static void on_sync_abandoned(struct loop_op *op, int res)
{
	(void)res;
	container_of(op, struct vm_presync, op)->busy = false;
}

void vm_snapshot_rest(struct vm *vm)
{
	vm->saving.presync = (struct vm_presync){.op = {.done = on_synced}};
	sync_disks(vm);
}

void vm_snapshot_failed(struct vm *vm, int r, const struct err *err)
{
	finish(vm, r, err);
}

int vm_snapshot(struct vm *vm, const struct vm_snapshot_request *request, struct err *err)
{
	struct vm_saving *saving = &vm->saving;
	struct vm_snapshot_request taken = *request;
	int r = 0;

	if (saving->busy || vm->rest.asked)
		r = err_set(err, -EBUSY, "another snapshot of this machine is being taken");
	else if (request->diff && saving->changes == VM_CHANGES_UNKNOWN)
		r = err_set(err, -ENOENT,
			"there is no snapshot of this machine that a diff could build upon");
	else if (request->live && vm->rest.resting)
		r = err_set(err, -EINVAL, "the machine is paused: there is nothing live about it");
	ASSERT(!request->live || (request->unsynced && !request->diff && !request->compress));
	if (r < 0) {
		close_files(&taken);
		return r;
	}
	saving->busy = true;
	saving->request = taken;
	saving->result = (struct vm_snapshot_result){0};
	if (request->diff)
		saving->result.parent = saving->parent;
	saving->rest_start_ns = now_ns();
	saving->paused = vm->rest.resting;
	if (saving->paused)
		on_rest(vm);
	else if (request->live)
		vm_live_start(vm);
	else
		vm_snapshot_rest(vm);
	return 0;
}

void vm_snapshot_settle(struct vm *vm, bool committed)
{
	struct vm_saving *saving = &vm->saving;

	if (!saving->busy)
		return;
	saving->busy = false;
	// Without: what was carried stays so, and what is logged will be added to it. A machine
	// that was restored still knows its changes by its pages.
	if (!committed || !saving->logging)
		return;
	saving->parent = saving->request.id;
	saving->changes = VM_CHANGES_LOG;
	memset(saving->carried, 0, guest_mem_bitmap_words(&vm->mem) * sizeof(*saving->carried));
}

void vm_changes_since(const struct vm *vm, char ret_text[SNAPSHOT_ID_TEXT_LEN + 1])
{
	ret_text[0] = '\0';
	if (vm->saving.changes != VM_CHANGES_UNKNOWN)
		snapshot_id_text(&vm->saving.parent, ret_text);
}

void vm_snapshot_fini(struct vm *vm)
{
	struct vm_saving *saving = &vm->saving;

	if (saving->child > 0)
		kill(saving->child, SIGKILL);
	reap(saving);
	vm_live_fini(vm);
	saving->presync.op.done = on_sync_abandoned;
	while (saving->presync.busy && loop_turn(&vm->loop, UINT64_MAX, NULL) == 0)
		;
	if (vm->loop.up)
		loop_watch_del(&vm->loop, &saving->watch);
	fd_close(&saving->result_fd);
	close_files(&saving->request);
	free(saving->carried);
	saving->carried = NULL;
}

// --- Restoring -------------------------------------------------------------------------------

struct opened {
	int dir_fd;
	char *text; // of the newest state file, which image points into
	struct image image;
	struct memory_layer layers[MEMORY_LAYERS_MAX]; // from the newest to the oldest
	unsigned int nr_layers;
};

static int open_one(int dir_fd, const char *dir, struct memory_layer *ret_layer, char **ret_text,
	struct image *ret_image, struct err *err)
{
	char path[PATH_MAX];
	CLEANUP_FREE char *text = NULL;
	size_t len;
	int r;

	if (snprintf(path, sizeof(path), "/proc/self/fd/%d/" STATE_FILE, dir_fd) < 0)
		return -EINVAL;
	r = fd_read_file(path, IMAGE_FILE_BYTES_MAX, &text, &len, err);
	if (r == 0)
		r = image_parse(ret_image, text, len, err);
	if (r == 0)
		r = memory_open(ret_layer, dir_fd, ret_image, err);
	if (r < 0)
		return err_wrap(err, r, "snapshot %s", dir);
	*ret_text = TAKE_PTR(text);
	return 0;
}

static void close_all(struct opened *all)
{
	for (unsigned int i = 0; i < all->nr_layers; i++)
		memory_close(&all->layers[i]);
	free(all->text);
	fd_close(&all->dir_fd);
}

// A snapshot and its ancestors, which lie beside it under their ids.
static int open_chain(struct opened *all, const char *dir, struct err *err)
{
	struct image image = {0};
	int r = 0;

	all->dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (all->dir_fd < 0)
		return err_errno(err, -errno, "snapshot %s", dir);
	while (r == 0) {
		char name[SNAPSHOT_ID_TEXT_LEN + 4], *text = NULL;
		struct snapshot_id want = image.parent;
		int up;

		r = open_one(all->dir_fd, dir, &all->layers[all->nr_layers], &text, &image, err);
		if (r < 0)
			return r;
		all->nr_layers++;
		if (all->nr_layers == 1) {
			all->image = image;
			all->text = text;
		} else {
			free(text);
			if (!snapshot_id_equal(&want, &image.id))
				return err_set(err, -EBADMSG,
					"snapshot %s: an ancestor is not the one that it names",
					dir);
		}
		if (snapshot_id_none(&image.parent))
			return 0;
		if (all->nr_layers == MEMORY_LAYERS_MAX)
			return err_set(err, -EBADMSG, "snapshot %s: more than %u ancestors", dir,
				MEMORY_LAYERS_MAX - 1);
		memcpy(name, "../", 4);
		snapshot_id_text(&image.parent, name + 3);
		up = openat(all->dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (up < 0)
			return err_errno(
				err, -errno, "snapshot %s: its ancestor %s", dir, name + 3);
		fd_close(&all->dir_fd);
		all->dir_fd = up;
	}
	return r;
}

int vm_memory_way_parse(const char *text, enum vm_memory_way *ret_way, struct err *err)
{
	static const char *const names[] = {
		[VM_MEMORY_AUTO] = "auto",
		[VM_MEMORY_MAPPED] = "mapped",
		[VM_MEMORY_LAZY] = "lazy",
		[VM_MEMORY_EAGER] = "eager",
	};

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (!strcmp(text, names[i])) {
			*ret_way = (enum vm_memory_way)i;
			return 0;
		}
	return err_set(err, -EINVAL,
		"memory is restored 'auto', 'mapped', 'lazy' or 'eager', not "
		"'%.40s'",
		text);
}

// The handler's thread.
static void on_lazy_failed(void *opaque, const struct err *err)
{
	const struct vm *vm = opaque;

	vm->params.fatal(vm->params.opaque, err);
}

// The handler's thread.
static int on_lazy_confine(void *opaque, struct err *err)
{
	const struct vm *vm = opaque;

	return vm->params.confine_thread ? vm->params.confine_thread(JAIL_LAZY, err) : 0;
}

static int start_lazy(struct vm *vm, int uffd, struct err *err)
{
	const struct lazy_config config = {
		.chain = vm->chain,
		.mem = &vm->mem,
		.prefetch = vm->working.set,
		.failed = on_lazy_failed,
		.confine = on_lazy_confine,
		.opaque = vm,
	};

	chain_set_backed(vm->chain, &vm->mem);
	return lazy_create(&vm->lazy, &config, uffd, err);
}

static int fill_memory(struct vm *vm, const struct snapshot_id *id, struct err *err)
{
	bool mappable = !chain_compressed(vm->chain);
	enum vm_memory_way way = vm->params.memory_way;
	struct err why = {0};
	int uffd = -1, r;

	// What is to be opened is opened before the jail, and the handler started in it.
	if (way == VM_MEMORY_LAZY || (way == VM_MEMORY_AUTO && !mappable)) {
		uffd = lazy_open(&why);
		vm_working_open(vm, vm->params.snapshot, id);
	}
	r = vm_confine(vm, err);
	if (r < 0) {
		fd_close(&uffd);
		return r;
	}
	if (way == VM_MEMORY_LAZY || (way == VM_MEMORY_AUTO && !mappable)) {
		r = start_lazy(vm, uffd, &why);
		if (r == 0)
			return 0;
		log_line(LOG_WARN, "vm", "its memory is %s: %s",
			mappable ? "mapped instead" : "read at once", why.msg);
		way = VM_MEMORY_AUTO;
	}
	if (way == VM_MEMORY_EAGER || (way == VM_MEMORY_AUTO && !mappable))
		return chain_read(vm->chain, &vm->mem, err);
	r = chain_map(vm->chain, &vm->mem, err);
	// The mappings are enough.
	chain_destroy(TAKE_PTR(vm->chain));
	return r;
}

static int load_memory(struct vm *vm, struct opened *all, struct err *err)
{
	struct memory_layer base_first[MEMORY_LAYERS_MAX];
	unsigned int nr = all->nr_layers;
	int r;

	for (unsigned int i = 0; i < nr; i++)
		base_first[i] = all->layers[nr - 1 - i];
	r = chain_create(&vm->chain, base_first, nr, guest_mem_size_bytes(&vm->mem), err);
	if (r < 0)
		return r;
	all->nr_layers = 0; // they are the chain's
	return fill_memory(vm, &all->image.id, err);
}

void vm_memory_fini(struct vm *vm)
{
	lazy_destroy(TAKE_PTR(vm->lazy));
	vm_working_fini(vm);
	chain_destroy(TAKE_PTR(vm->chain));
}

PRINTF_LIKE(5, 6)
static int section(const struct image *image, const void **ret_data, size_t *ret_len,
	struct err *err, const char *fmt, ...)
{
	char name[NAME_BYTES];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(name, sizeof(name), fmt, ap);
	va_end(ap);
	return image_section(image, name, ret_data, ret_len, err);
}

static int count_sections(const struct image *image, const char *prefix)
{
	int nr = 0;

	for (unsigned int i = 0; i < image->nr; i++)
		nr += strncmp(image->sections[i].name, prefix, strlen(prefix)) == 0;
	return nr;
}

// The disks are what they were: whoever asked for the restore has put them in place.
static int check_disks(struct vm *vm, const struct image *image, struct err *err)
{
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++) {
		struct overlay *overlay = vm->disks[i] ? virtio_blk_overlay(vm->disks[i]) : NULL;
		char name[OVERLAY_NAME_BYTES];
		const void *data;
		size_t len;
		int r;

		if (!overlay)
			continue;
		r = section(image, &data, &len, err, VM_DISK_SECTION, i);
		if (r < 0)
			return r;
		if (!has_frozen(overlay, name) || len != sizeof(name) ||
			memcmp(name, data, sizeof(name)) != 0)
			return err_set(err, -EBADMSG, "%s is not the disk that it was taken with",
				config_disk_name(i));
	}
	return 0;
}

static int load_state(struct vm *vm, const struct image *image, struct err *err)
{
	const void *data;
	size_t len;
	int r = check_disks(vm, image, err);

	if (r < 0)
		return r;

	if (count_sections(image, "vcpu.") != (int)vm->nr_vcpus ||
		count_sections(image, "virtio.") != (int)vm->nr_virtio)
		return err_set(err, -EINVAL,
			"it is of a machine with %d vCPUs and %d devices, and this one has %u and "
			"%u: vm.ini does not fit it",
			count_sections(image, "vcpu."), count_sections(image, "virtio."),
			vm->nr_vcpus, vm->nr_virtio);
	for (unsigned int i = 0; i < vm->nr_vcpus && r == 0; i++) {
		r = section(image, &data, &len, err, "vcpu.%u", i);
		if (r == 0)
			r = vcpu_restore(vm->vcpus[i], data, len, err);
	}
	if (r == 0)
		r = section(image, &data, &len, err, "kvm");
	if (r == 0)
		r = kvm_restore(&vm->kvm, data, len, err);
	if (r == 0)
		r = section(image, &data, &len, err, "machine");
	if (r == 0)
		r = machine_restore(vm->machine, data, len, err);
	for (unsigned int i = 0; i < vm->nr_virtio && r == 0; i++) {
		r = section(image, &data, &len, err, "virtio.%u", i);
		if (r == 0)
			r = virtio_dev_restore(vm->virtio[i].dev, data, len, err);
	}
	return r;
}

int vm_load(struct vm *vm, const char *snapshot, struct err *err)
{
	struct opened *all = calloc(1, sizeof(*all));
	int r;

	if (!all)
		return err_errno(err, -ENOMEM, "snapshot");
	all->dir_fd = -1;
	r = open_chain(all, snapshot, err);
	if (r == 0) {
		r = load_memory(vm, all, err);
		if (r == 0)
			r = load_state(vm, &all->image, err);
		if (r < 0)
			err_wrap(err, r, "snapshot %s", snapshot);
	}
	if (r == 0) {
		vm->saving.parent = all->image.id;
		vm->saving.changes = VM_CHANGES_PAGES;
	}
	close_all(all);
	free(all);
	return r;
}

int vm_awake(struct vm *vm, struct err *err)
{
	vm_working_awake(vm);
	return virtio_vsock_publish(vm->vsock, err);
}
