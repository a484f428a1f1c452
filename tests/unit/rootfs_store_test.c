// SPDX-License-Identifier: Apache-2.0
// cli/rootfs_store: images come whole or not at all, are found by name and id, stay while they are
// needed, and manifests are not believed.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/home.h"
#include "cli/rootfs_store.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

static char home[64];

static int make_home(void **state)
{
	(void)state;
	strcpy(home, "/tmp/mayfly-images-XXXXXX");
	return mkdtemp(home) ? setenv("MAYFLY_HOME", home, 1) : -1;
}

static int remove_home(void **state)
{
	(void)state;
	return home_remove(home, NULL);
}

static void put(int dir_fd, const char *text, off_t size)
{
	int fd = openat(dir_fd, ROOTFS_DISK, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, size), 0);
	assert_int_equal(pwrite(fd, text, strlen(text), 40960), strlen(text));
	fd_close(&fd);
}

static int checksum(const char *path, bool punch, char ret[SHA256_TEXT_LEN + 1], uint64_t *ret_data)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	struct err err = {0};
	int r;

	assert_true(fd >= 0);
	r = rootfs_checksum(fd, punch, ret, ret_data, &err);
	fd_close(&fd);
	return r;
}

static void make(const char *name, const char *text, struct rootfs *ret)
{
	struct rootfs_writer writer;
	struct rootfs image = {.source = "a test", .config = json_pack("{s:s}", "user", "me")};
	struct err err = {0};
	char path[PATH_MAX + 16];

	assert_int_equal(rootfs_begin(&writer, &err), 0);
	put(writer.dir_fd, text, 1 << 20);
	snprintf(path, sizeof(path), "%s/" ROOTFS_DISK, writer.dir);
	assert_int_equal(checksum(path, true, image.root_sha256, &image.data_bytes), 0);
	image.size_bytes = 1 << 20;
	assert_int_equal(rootfs_commit(&writer, &image, name, &err), 0);
	rootfs_end(&writer);
	*ret = image;
}

static unsigned int count(const char *prefix)
{
	char command[160];
	unsigned int n = 0;
	FILE *out;

	snprintf(command, sizeof(command), "ls %s/images | grep -c '^%s'", home, prefix);
	out = popen(command, "r");
	assert_non_null(out);
	assert_int_equal(fscanf(out, "%u", &n), 1);
	pclose(out);
	return n;
}

static void made_and_found(void **state)
{
	struct rootfs a, b, same, found;
	struct err err = {0};
	char prefix[7];
	(void)state;

	make("one", "abc", &a);
	make("two", "abd", &b);
	make("three", "abc", &same);
	assert_string_not_equal(a.id, b.id);
	assert_string_equal(a.id, same.id);
	assert_int_equal(count("[0-9a-f]"), 2);
	assert_int_equal(count("making-"), 0);
	assert_int_equal(a.data_bytes, 4096);
	assert_int_equal(rootfs_find("three", &found, &err), 0);
	assert_string_equal(found.id, a.id);
	assert_string_equal(found.dir, a.dir);
	assert_string_equal(found.source, "a test");
	assert_int_equal(found.size_bytes, 1 << 20);
	assert_string_equal(json_string_value(json_object_get(found.config, "user")), "me");
	rootfs_fini(&found);
	snprintf(prefix, sizeof(prefix), "%.6s", b.id);
	assert_int_equal(rootfs_find(prefix, &found, &err), 0);
	assert_string_equal(found.id, b.id);
	rootfs_fini(&found);
	prefix[5] = '\0';
	assert_int_equal(rootfs_find(prefix, &found, &err), -ENOENT);
	assert_int_equal(rootfs_find("../one", &found, &err), -EINVAL);
	assert_int_equal(rootfs_find("four", &found, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "mayfly image ls"));
	rootfs_fini(&a);
	rootfs_fini(&b);
	rootfs_fini(&same);
}

static void a_name_can_move(void **state)
{
	int leftovers = -1;
	struct rootfs a, b, found;
	struct err err = {0};
	(void)state;

	make("name", "old", &a);
	make("name", "new", &b);
	assert_int_equal(rootfs_find("name", &found, &err), 0);
	assert_string_equal(found.id, b.id);
	assert_int_equal(count("[0-9a-f]"), 2);
	assert_int_equal(rootfs_gc(&leftovers, &err), 1); // nobody can name the old one
	assert_int_equal(rootfs_gc(&leftovers, &err), 0);
	assert_int_equal(leftovers, 0);
	assert_int_equal(count("[0-9a-f]"), 1);
	rootfs_fini(&found);
	rootfs_fini(&a);
	rootfs_fini(&b);
}

static void not_committed_is_gone(void **state)
{
	int leftovers = -1;
	struct rootfs_writer writer, other;
	struct err err = {0};
	(void)state;

	assert_int_equal(rootfs_begin(&writer, &err), 0);
	// Another one's is left alone while it is at work, and taken away when it has died.
	assert_int_equal(rootfs_begin(&other, &err), 0);
	assert_int_equal(count("making-"), 2);
	rootfs_end(&other);
	assert_int_equal(count("making-"), 1);
	assert_int_equal(rootfs_gc(&leftovers, &err), 0);
	assert_int_equal(leftovers, 0);
	fd_close(&writer.dir_fd);
	assert_int_equal(rootfs_begin(&other, &err), 0);
	assert_int_equal(count("making-"), 1);
	fd_close(&other.dir_fd);
	assert_int_equal(rootfs_gc(&leftovers, &err), 0);
	assert_int_equal(leftovers, 1);
	assert_int_equal(count("making-"), 0);
	rootfs_end(&other);
	rootfs_end(&(struct rootfs_writer){0});
}

static void needed_ones_stay(void **state)
{
	struct rootfs a, found = {0};
	struct config config;
	struct err err = {0};
	char dir[PATH_MAX];
	(void)state;

	make("one", "abc", &a);
	config_defaults(&config);
	strcpy(config.kernel, "/k");
	assert_true(snprintf(config.disks[0].file, PATH_MAX, "%s/" ROOTFS_DISK, a.dir) < PATH_MAX);
	assert_int_equal(rootfs_of_machine(&config, &found, &err), 0); // not its root
	config.root = CONFIG_ROOT_DISK;
	assert_int_equal(rootfs_of_machine(&config, &found, &err), 1);
	assert_string_equal(found.id, a.id);
	rootfs_fini(&found);
	assert_int_equal(home_create("vm", &config, dir, &err), 0);
	assert_int_equal(rootfs_remove("one", &err), -EBUSY);
	assert_non_null(strstr(err.msg, "machine 'vm'"));
	assert_int_equal(rootfs_remove(a.id, &err), -EBUSY);
	assert_int_equal(rootfs_find("one", &found, &err), 0);
	rootfs_fini(&found);
	// A name can go, as long as there is another.
	rootfs_fini(&a);
	make("two", "abc", &a);
	assert_int_equal(rootfs_remove("one", &err), 0);
	assert_int_equal(rootfs_remove("one", &err), -ENOENT);
	assert_int_equal(rootfs_remove("two", &err), -EBUSY);
	assert_int_equal(home_remove(dir, &err), 0);
	assert_int_equal(rootfs_remove("two", &err), 0);
	assert_int_equal(count("[0-9a-f]"), 0);
	// Of a stranger's disk nothing is said.
	strcpy(config.disks[0].file, "/somewhere/root.img");
	assert_int_equal(rootfs_of_machine(&config, &found, &err), 0);
	rootfs_fini(&a);
}

static void with_all_its_names(void **state)
{
	struct rootfs a;
	struct err err = {0};
	(void)state;

	make("one", "abc", &a);
	rootfs_fini(&a);
	make("two", "abc", &a);
	assert_int_equal(rootfs_remove(a.id, &err), 0);
	assert_int_equal(rootfs_find("one", &a, &err), -ENOENT);
	assert_int_equal(rootfs_find("two", &a, &err), -ENOENT);
	rootfs_fini(&a);
}

static void only_content_counts(void **state)
{
	char path[] = "/tmp/mayfly-image-XXXXXX", first[SHA256_TEXT_LEN + 1],
	     again[SHA256_TEXT_LEN + 1];
	static const char zeros[65536];
	int fd = mkstemp(path);
	uint64_t data;
	struct stat st;
	(void)state;

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, 1 << 20), 0);
	assert_int_equal(pwrite(fd, "x", 1, 500000), 1);
	assert_int_equal(checksum(path, false, first, &data), 0);
	assert_int_equal(data, 4096);
	// Zeros that are written are no content, nor is room that is set aside, which goes.
	assert_int_equal(pwrite(fd, zeros, sizeof(zeros), 100000), sizeof(zeros));
	assert_int_equal(fallocate(fd, 0, 700000, 200000), 0);
	assert_int_equal(checksum(path, true, again, &data), 0);
	assert_string_equal(first, again);
	assert_int_equal(fstat(fd, &st), 0);
	assert_true(st.st_blocks * 512 < 200000);
	assert_int_equal(pwrite(fd, "y", 1, 500001), 1);
	assert_int_equal(checksum(path, false, again, &data), 0);
	assert_string_not_equal(first, again);
	// The same data elsewhere, and another length.
	assert_int_equal(pwrite(fd, zeros, 2, 500000), 2);
	assert_int_equal(pwrite(fd, "x", 1, 500000 + 4096), 1);
	assert_int_equal(checksum(path, false, again, &data), 0);
	assert_string_not_equal(first, again);
	assert_int_equal(pwrite(fd, zeros, 1, 500000 + 4096), 1);
	assert_int_equal(pwrite(fd, "x", 1, 500000), 1);
	assert_int_equal(checksum(path, false, again, &data), 0);
	assert_string_equal(first, again);
	assert_int_equal(ftruncate(fd, (1 << 20) + 4096), 0);
	assert_int_equal(checksum(path, false, again, &data), 0);
	assert_string_not_equal(first, again);
	fd_close(&fd);
	unlink(path);
}

#define SUM "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

static void manifests(void **state)
{
	// Of these two the id is that of the content.
	static const char *const bad[] = {
		"",
		"[]",
		"{\"format\":2}",
		"{\"format\":1,\"id\":\"" SUM "\",\"root_sha256\":\"" SUM "\",\"source\":\"s\"}",
		"{\"format\":1,\"id\":\"../..\",\"root_sha256\":\"" SUM
		"\",\"source\":\"s\",\"config\":{}}",
		"{\"format\":1,\"id\":\"" SUM "\",\"root_sha256\":\"" SUM
		"\",\"source\":\"\\u001b[2J\",\"config\":{}}",
		"{\"format\":1,\"id\":\"" SUM "\",\"root_sha256\":\"" SUM
		"\",\"source\":\"s\",\"config\":{\"env\":[\"A\"]}}",
		"{\"format\":1,\"id\":\"" SUM "\",\"root_sha256\":\"" SUM
		"\",\"source\":\"s\",\"config\":{\"cmd\":[7]}}",
		"{\"format\":1,\"id\":\"" SUM "\",\"root_sha256\":\"" SUM
		"\",\"source\":\"s\",\"config\":{\"user\":[]}}",
		"{\"format\":1,\"id\":\"" SUM "\",\"root_sha256\":\"" SUM
		"\",\"source\":\"s\",\"config\":{\"volume\":\"/\"}}",
	};
	char text[512], id[SHA256_TEXT_LEN + 1];
	struct rootfs image = {0};
	struct sha256_ctx sha;
	struct err err = {0};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		assert_int_equal(
			rootfs_parse_manifest(bad[i], strlen(bad[i]), &image, &err), -EBADMSG);
	sha256_init(&sha);
	sha256_update(&sha, SHA256_TEXT_LEN + 15, (const uint8_t *)SUM "{\"env\":[\"A=1\"]}");
	sha256_text(&sha, id);
	for (int wrong = 0; wrong <= 1; wrong++) {
		snprintf(text, sizeof(text),
			"{\"format\":1,\"id\":\"%s\",\"root_sha256\":\"" SUM
			"\",\"source\":\"s\",\"config\":{\"env\":[\"A=%d\"]}}",
			id, 1 + wrong);
		assert_int_equal(rootfs_parse_manifest(text, strlen(text), &image, &err),
			wrong ? -EBADMSG : 0);
	}
	assert_string_equal(image.id, id);
	rootfs_fini(&image);
}

static int list(void *opaque, const struct rootfs *image, const char *names)
{
	(void)image;
	strcat(opaque, names);
	strcat(opaque, ";");
	return 0;
}

static void broken(void *opaque, const char *dir, const struct err *err)
{
	(void)dir;
	assert_true(err->msg[0]);
	strcat(opaque, "broken;");
}

static void listed(void **state)
{
	struct rootfs a, b;
	struct err err = {0};
	char all[256] = "", path[PATH_MAX + 32];
	(void)state;

	make("one", "abc", &a);
	make("uno", "abc", &b);
	rootfs_fini(&b);
	assert_int_equal(rootfs_each(list, broken, all, &err), 0);
	assert_string_equal(all, "one, uno;");
	snprintf(path, sizeof(path), "%s/manifest.json", a.dir);
	assert_int_equal(truncate(path, 20), 0);
	all[0] = '\0';
	assert_int_equal(rootfs_each(list, broken, all, &err), 0);
	assert_string_equal(all, "broken;");
	assert_true(rootfs_find("one", &b, &err) < 0);
	assert_non_null(strstr(err.msg, "manifest.json"));
	// It can be removed all the same.
	assert_int_equal(rootfs_remove(a.id, &err), 0);
	rootfs_fini(&a);
}

#define IN_HOME(test) cmocka_unit_test_setup_teardown(test, make_home, remove_home)

int main(void)
{
	const struct CMUnitTest tests[] = {
		IN_HOME(made_and_found),
		IN_HOME(a_name_can_move),
		IN_HOME(not_committed_is_gone),
		IN_HOME(needed_ones_stay),
		IN_HOME(with_all_its_names),
		cmocka_unit_test(only_content_counts),
		cmocka_unit_test(manifests),
		IN_HOME(listed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
