// SPDX-License-Identifier: Apache-2.0
// Making an image; see the header. Archives are unpacked by a process that has made the folder its
// root, so that nothing in them, links included, reaches out of it. One thread.
#include "cli/rootfs_make.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/home.h"
#include "cli/oci.h"
#include "cli/tool.h"
#include "vmm/base/fd.h"

// In the folder of what is being made.
#define ARCHIVE "archive" // what was unpacked
#define LAYER   "layer"
#define TREE    "tree" // the root file system

#define JOURNAL_FROM_BYTES (512 * MIB)

struct stage {
	const struct rootfs_make *make;
	const char *doing;
	int fd; // whose place in the file tells how far it is, or -1
	bool shown;
};

static void show(void *opaque)
{
	struct stage *stage = opaque;
	off_t at = stage->fd >= 0 ? lseek(stage->fd, 0, SEEK_CUR) : -1;

	if (!stage->make->show_progress)
		return;
	stage->shown = true;
	fprintf(stderr, "\r\033[K%s: %s", stage->make->name, stage->doing);
	if (at > 0)
		fprintf(stderr, " (%lld MiB read)", (long long)at / (long long)MIB);
}

static void shown(const struct stage *stage)
{
	if (stage->shown)
		fputs("\r\033[K", stderr);
}

static int run(const struct rootfs_make *make, const char *doing, const char *const *argv,
	const char *package, int fd, struct err *err)
{
	struct stage stage = {make, doing, fd, false};
	struct tool tool = {
		.argv = argv,
		.package = package,
		.stdin_fd = fd,
		.stdout_fd = -1,
		.signal_fd = make->signal_fd,
		.progress = show,
		.opaque = &stage,
	};
	int r = tool_run(&tool, err);

	shown(&stage);
	return r;
}

static int joined(char ret[PATH_MAX], const char *dir, const char *name, struct err *err)
{
	if (snprintf(ret, PATH_MAX, "%s/%s", dir, name) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return 0;
}

// Unpacks an archive into a new folder of the writer's. Returns the folder's fd, the caller's.
static int unpack(const struct rootfs_make *make, const struct rootfs_writer *writer,
	const char *folder, int fd, struct err *err)
{
	char path[PATH_MAX];
	// What would be in /dev is the kernel's to say.
	const char *argv[] = {"bsdtar", "-x", "-p", "-f", "-", "--numeric-owner", "--no-fflags",
		"--chroot", "-C", path, "--exclude", "^./dev/?*", "--exclude", "^dev/?*", NULL};
	int r = joined(path, writer->dir, folder, err), dir_fd;

	if (r < 0)
		return r;
	if (mkdir(path, 0755) < 0)
		return err_errno(err, -errno, "%s", path);
	r = run(make, "unpacking", argv, "libarchive-tools", fd, err);
	if (r < 0)
		return r;
	dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return dir_fd < 0 ? err_errno(err, -errno, "%s", path) : dir_fd;
}

// The layers of a container's image, one over the other, as TREE.
static int stack_layers(const struct rootfs_make *make, const struct rootfs_writer *writer,
	int layout_fd, json_t **ret_config, struct err *err)
{
	static struct oci_parts parts;
	CLEANUP_FD int tree_fd = -1;
	char path[PATH_MAX];
	int r = oci_read(layout_fd, &parts, ret_config, err);

	if (r == 0)
		r = joined(path, writer->dir, LAYER, err);
	if (r < 0)
		return r;
	if (mkdirat(writer->dir_fd, TREE, 0755) < 0)
		return err_errno(err, -errno, "%s/" TREE, writer->dir);
	tree_fd = openat(writer->dir_fd, TREE, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (tree_fd < 0)
		return err_errno(err, -errno, "%s/" TREE, writer->dir);
	for (unsigned int i = 0; r == 0 && i < parts.nr_layers; i++) {
		CLEANUP_FD int fd = oci_open(layout_fd, &parts.layers[i], err);
		CLEANUP_FD int layer_fd = -1;

		if (fd < 0)
			return fd;
		r = layer_fd = unpack(make, writer, LAYER, fd, err);
		if (r >= 0)
			r = oci_merge(tree_fd, layer_fd, err);
		if (r == 0)
			r = home_remove(path, err);
		if (r < 0)
			return err_wrap(err, r, "layer %u", i + 1);
	}
	return 0;
}

// Puts the root file system where *ret_tree says: the folder itself, or TREE.
static int make_tree(const struct rootfs_make *make, const struct rootfs_writer *writer,
	char ret_tree[PATH_MAX], json_t **ret_config, struct err *err)
{
	CLEANUP_FD int unpacked_fd = -1;
	int from_fd = make->fd, r = 0;

	if (!make->folder) {
		r = unpacked_fd = unpack(make, writer, ARCHIVE, make->fd, err);
		from_fd = unpacked_fd;
	}
	if (r < 0)
		return r;
	if (oci_is_layout(from_fd)) {
		r = stack_layers(make, writer, from_fd, ret_config, err);
		return r < 0 ? r : joined(ret_tree, writer->dir, TREE, err);
	}
	return make->folder ? joined(ret_tree, make->folder, ".", err)
			    : joined(ret_tree, writer->dir, ARCHIVE, err);
}

// A folder that an image left out, but that programs need.
static int complete(const char *tree, struct err *err)
{
	static const struct {
		const char *name;
		mode_t mode;
	} folders[] = {{"dev", 0755}, {"proc", 0555}, {"sys", 0555}, {"run", 0755}, {"etc", 0755},
		{"tmp", 01777}, {"root", 0700}};
	CLEANUP_FD int fd = open(tree, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		return err_errno(err, -errno, "%s", tree);
	for (size_t i = 0; i < ARRAY_SIZE(folders); i++) {
		if (mkdirat(fd, folders[i].name, 0700) < 0) {
			if (errno == EEXIST)
				continue;
			return err_errno(err, -errno, "%s/%s", tree, folders[i].name);
		}
		if (fchmodat(fd, folders[i].name, folders[i].mode, 0) < 0)
			return err_errno(err, -errno, "%s/%s", tree, folders[i].name);
	}
	return 0;
}

// No checksums of metadata: on a host that interprets the guest's kernel they are a boot's worth of
// time, and the image has one of its own. Tables are left as holes.
static int make_disk(const struct rootfs_make *make, const struct rootfs_writer *writer,
	const char *tree, struct err *err)
{
	char path[PATH_MAX], size[32];
	// As large as it gets by itself takes hundreds of megabytes of an overlay.
	const bool large = make->size_bytes >= JOURNAL_FROM_BYTES;
	const char *argv[] = {"mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L",
		"root", "-O", "^metadata_csum,uninit_bg", "-E",
		"lazy_itable_init=0,lazy_journal_init=0", "-J", large ? "size=32" : "size=4", "-d",
		tree, path, size, NULL};
	int r = joined(path, writer->dir, ROOTFS_DISK, err);

	if (r < 0)
		return r;
	snprintf(size, sizeof(size), "%lluK", (unsigned long long)(make->size_bytes / KIB));
	r = run(make, "writing the file system", argv, "e2fsprogs", -1, err);
	if (r == -EIO)
		return err_wrap(err, r, "a file system of %llu MiB (--size SIZE is another)",
			(unsigned long long)(make->size_bytes / MIB));
	return r;
}

static int finish(const struct rootfs_make *make, const struct rootfs_writer *writer,
	struct rootfs *image, struct err *err)
{
	struct stage stage = {make, "computing its checksum", -1, false};
	CLEANUP_FD int fd = openat(writer->dir_fd, ROOTFS_DISK, O_RDWR | O_CLOEXEC);
	struct stat st;
	int r;

	if (fd < 0 || fstat(fd, &st) < 0)
		return err_errno(err, -errno, "%s/" ROOTFS_DISK, writer->dir);
	show(&stage);
	r = rootfs_checksum(fd, true, image->root_sha256, &image->data_bytes, err);
	image->size_bytes = (uint64_t)st.st_size;
	shown(&stage);
	return r;
}

int rootfs_make(const struct rootfs_make *make, struct rootfs *ret_image, struct err *err)
{
	struct rootfs_writer writer = {.dir_fd = -1};
	CLEANUP_ROOTFS struct rootfs image = {0};
	char tree[PATH_MAX], path[PATH_MAX];
	static const char *const used[] = {ARCHIVE, LAYER, TREE};
	int r = rootfs_begin(&writer, err);

	snprintf(image.source, sizeof(image.source), "%s", make->source);
	if (r == 0)
		r = make_tree(make, &writer, tree, &image.config, err);
	if (r == 0 && !make->folder)
		r = complete(tree, err);
	if (r == 0)
		r = make_disk(make, &writer, tree, err);
	if (r == 0 && !image.config)
		image.config = json_object();
	if (r == 0)
		r = finish(make, &writer, &image, err);
	for (size_t i = 0; r == 0 && i < ARRAY_SIZE(used); i++) {
		r = joined(path, writer.dir, used[i], err);
		if (r == 0)
			r = home_remove(path, err);
	}
	if (r == 0)
		r = rootfs_commit(&writer, &image, make->name, err);
	rootfs_end(&writer);
	if (r < 0)
		return r;
	*ret_image = image;
	image.config = NULL;
	return 0;
}
