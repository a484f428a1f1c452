// SPDX-License-Identifier: Apache-2.0
// cli/layers: the disks of snapshots as links, given to machines, taken back, and never others.
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/layers.h"
#include "devices/overlay.h"
#include "snapshot/image.h"
#include "vmm/base/buf.h"
#include "vmm/base/fd.h"

#define DISK_BYTES (16U * OVERLAY_BLOCK_BYTES)

static struct {
	char root[64], machine[80], other[80], snapshot[80];
} t;

static int setup(void **state)
{
	(void)state;
	strcpy(t.root, "/tmp/mayfly-layers-XXXXXX");
	if (!mkdtemp(t.root))
		return -1;
	snprintf(t.machine, sizeof(t.machine), "%s/machine", t.root);
	snprintf(t.other, sizeof(t.other), "%s/other", t.root);
	snprintf(t.snapshot, sizeof(t.snapshot), "%s/snapshot", t.root);
	return mkdir(t.machine, 0700) < 0 || mkdir(t.other, 0700) < 0 ||
	       mkdir(t.snapshot, 0700) < 0;
}

static int teardown(void **state)
{
	char command[128];

	(void)state;
	snprintf(command, sizeof(command), "rm -rf '%s'", t.root);
	return system(command);
}

static int open_folder(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	assert_true(fd >= 0);
	return fd;
}

// Opens a machine's disk, writes a byte all over its first block if it is not 0, and returns the
// byte that was there. layer: frozen afterwards; its name.
static int use_disk(const char *machine, int byte, char layer[OVERLAY_NAME_BYTES])
{
	char names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];
	int dir_fd = open_folder(machine);
	struct overlay_params params = {
		.dir_fd = dir_fd, .disk = "disk", .base_fd = -1, .size_bytes = DISK_BYTES};
	uint8_t block[OVERLAY_BLOCK_BYTES], was = 0;
	struct overlay *ov;
	struct overlay_run run;
	struct err err = {0};

	if (overlay_open(&ov, &params, &err) < 0)
		fail_msg("%s", err.msg);
	overlay_read(ov, 0, sizeof(block), &run);
	if (run.kind == OVERLAY_FILE)
		assert_int_equal(pread(run.fd, &was, 1, (off_t)run.file_off), 1);
	if (byte) {
		memset(block, byte, sizeof(block));
		assert_int_equal(overlay_write(ov, 0, sizeof(block), &run), 0);
		assert_int_equal(
			pwrite(run.fd, block, sizeof(block), (off_t)run.file_off), sizeof(block));
		overlay_wrote(ov, run.kind, 0, sizeof(block), true);
	}
	if (layer) {
		assert_int_equal(overlay_freeze(ov, &err), 0);
		memcpy(layer, names[overlay_frozen(ov, names) - 1], OVERLAY_NAME_BYTES);
	}
	overlay_close(ov);
	close(dir_fd);
	return was;
}

static void write_state(const char *layer, size_t len)
{
	struct snapshot_id id = {{1}}, none = {{0}};
	struct image_section section = {"disk.0", layer, len};
	struct buf file = {0};
	struct err err = {0};
	char path[96];
	int fd;

	assert_int_equal(image_write(&file, &id, &none, &section, layer != NULL, &err), 0);
	snprintf(path, sizeof(path), "%s/state", t.snapshot);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, file.data, file.len), 0);
	close(fd);
	buf_fini(&file);
}

static int count(const char *folder)
{
	char command[160], text[16] = "";
	FILE *out;

	snprintf(command, sizeof(command), "ls '%s/layers' 2>/dev/null | wc -l", folder);
	out = popen(command, "re");
	assert_non_null(out);
	assert_non_null(fgets(text, sizeof(text), out));
	pclose(out);
	return atoi(text);
}

// A snapshot of the machine, with the byte on its disk.
static void take(int byte)
{
	char layer[OVERLAY_NAME_BYTES];
	struct err err = {0};
	int fd = open_folder(t.snapshot);

	use_disk(t.machine, byte, layer);
	write_state(layer, sizeof(layer));
	if (layers_keep(fd, t.machine, &err) < 0 || layers_sync(fd, &err) < 0)
		fail_msg("%s", err.msg);
	close(fd);
}

static void a_clone_has_the_disk_and_its_own(void **state)
{
	struct err err = {0};

	(void)state;
	take(1);
	use_disk(t.machine, 2, NULL);
	assert_int_equal(layers_give(t.snapshot, t.other, false, &err), 0);
	layers_settle(t.snapshot, t.other);
	assert_int_equal(use_disk(t.other, 3, NULL), 1);
	assert_int_equal(use_disk(t.other, 0, NULL), 3);
	assert_int_equal(use_disk(t.machine, 0, NULL), 2);
	assert_int_equal(count(t.other), 1);
}

static void a_restore_goes_back_and_drops_what_came_after(void **state)
{
	char layer[OVERLAY_NAME_BYTES];
	struct err err = {0};

	(void)state;
	take(1);
	use_disk(t.machine, 2, layer);
	assert_int_equal(count(t.machine), 2);
	assert_int_equal(layers_give(t.snapshot, t.machine, true, &err), 0);
	// Not before it is known that it serves.
	assert_int_equal(count(t.machine), 2);
	layers_settle(t.snapshot, t.machine);
	assert_int_equal(count(t.machine), 1);
	assert_int_equal(use_disk(t.machine, 0, NULL), 1);
}

// Those above the snapshot's are merged; the snapshot goes back to what it was.
static void what_no_snapshot_has_is_merged(void **state)
{
	char layer[OVERLAY_NAME_BYTES];
	struct err err = {0};

	(void)state;
	take(1);
	for (int byte = 2; byte < 6; byte++)
		use_disk(t.machine, byte, layer);
	use_disk(t.machine, 6, NULL);
	assert_int_equal(count(t.machine), 5);
	assert_int_equal(layers_merge(t.machine, 5, &err), 0);
	assert_int_equal(layers_merge(t.machine, 2, &err), 3);
	assert_int_equal(layers_merge(t.machine, 2, &err), 0);
	assert_int_equal(count(t.machine), 2);
	assert_int_equal(use_disk(t.machine, 0, NULL), 6);
	assert_int_equal(layers_give(t.snapshot, t.machine, false, &err), 0);
	layers_settle(t.snapshot, t.machine);
	assert_int_equal(use_disk(t.machine, 0, NULL), 1);
	assert_int_equal(layers_merge("/nowhere", 2, &err), -ENOENT);
}

static void what_does_not_serve_is_undone(void **state)
{
	struct err err = {0};

	(void)state;
	take(1);
	use_disk(t.machine, 2, NULL);
	assert_int_equal(layers_give(t.snapshot, t.machine, false, &err), 0);
	layers_undo(t.machine);
	assert_int_equal(use_disk(t.machine, 0, NULL), 2);
	// A command that was killed has left the old disk beside the new one, which has been used
	// since: a later one that fails does not bring it back.
	assert_int_equal(layers_give(t.snapshot, t.machine, false, &err), 0);
	assert_int_equal(use_disk(t.machine, 3, NULL), 1);
	write_state("x", 2);
	assert_int_not_equal(layers_give(t.snapshot, t.machine, false, &err), 0);
	assert_int_equal(use_disk(t.machine, 0, NULL), 3);
	assert_int_equal(layers_clear(t.machine, &err), 0);
	assert_int_equal(use_disk(t.machine, 0, NULL), 0);
}

static void a_snapshot_without_disks_gives_none(void **state)
{
	struct err err = {0};
	int fd = open_folder(t.snapshot);

	(void)state;
	write_state(NULL, 0);
	assert_int_equal(layers_keep(fd, t.machine, &err), 0);
	assert_int_equal(layers_sync(fd, &err), 0);
	close(fd);
	assert_int_equal(layers_give(t.snapshot, t.other, false, &err), 0);
	assert_int_equal(count(t.other), 0);
}

// A snapshot may be a stranger's: it names no file of the host, and what it names is what it says.
static void strange_snapshots_are_refused(void **state)
{
	static const char *const names[] = {
		"../../../../../../../../etc/passwd", "", "x", "0123456789abcdef0123456789abcdef"};
	char layer[OVERLAY_NAME_BYTES], path[160], link[160];
	struct err err = {0};

	(void)state;
	take(1);
	use_disk(t.machine, 2, layer); // which the snapshot does not have
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		write_state(names[i], strlen(names[i]) + 1);
		assert_int_not_equal(layers_give(t.snapshot, t.machine, false, &err), 0);
		assert_int_equal(use_disk(t.machine, 0, NULL), 2);
	}
	// A link to a layer elsewhere, even a good one.
	snprintf(path, sizeof(path), "%s/layers/%s", t.machine, layer);
	snprintf(link, sizeof(link), "%s/layers/%s", t.snapshot, layer);
	assert_int_equal(symlink(path, link), 0);
	write_state(layer, sizeof(layer));
	assert_int_equal(layers_give(t.snapshot, t.other, false, &err), -ELOOP);
	assert_int_equal(count(t.other), 0);
}

int main(void)
{
#define TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
	const struct CMUnitTest tests[] = {
		TEST(a_clone_has_the_disk_and_its_own),
		TEST(a_restore_goes_back_and_drops_what_came_after),
		TEST(what_no_snapshot_has_is_merged),
		TEST(what_does_not_serve_is_undone),
		TEST(a_snapshot_without_disks_gives_none),
		TEST(strange_snapshots_are_refused),
	};

	return cmocka_run_group_tests_name("layers", tests, NULL, NULL);
}
