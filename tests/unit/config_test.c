// SPDX-License-Identifier: Apache-2.0
// vmm/config and vmm/base/parse: what is accepted, and that each refusal names line, key and cure.
#include "tests/support/test.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/config.h"

static void sizes(void **state)
{
	static const char *const bad[] = {"", "M", "12", "12X", "-1M", " 1M", "1M ", "1.5G", "1MM",
		"99999999999999999999K", "99999999999999T", "0x10M"};
	uint64_t n = 7;
	struct err err = {0};
	(void)state;

	assert_int_equal(parse_size("128M", &n, &err), 0);
	assert_true(n == 128 * MIB);
	assert_int_equal(parse_size("2g", &n, &err), 0);
	assert_true(n == 2 * GIB);
	assert_int_equal(parse_size("4KiB", &n, &err), 0);
	assert_true(n == 4096);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		assert_true(parse_size(bad[i], &n, &err) < 0);
		assert_true(n == 4096);
	}
}

static void durations(void **state)
{
	static const char *const bad[] = {"", "s", "-1s", "1 s", "1y", "1.5s", "99999999999999d"};
	uint64_t n = 0;
	struct err err = {0};
	(void)state;

	assert_int_equal(parse_duration("30", &n, &err), 0);
	assert_true(n == 30000000000ULL);
	assert_int_equal(parse_duration("250ms", &n, &err), 0);
	assert_true(n == 250000000ULL);
	assert_int_equal(parse_duration("2m", &n, &err), 0);
	assert_true(n == 120000000000ULL);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		assert_true(parse_duration(bad[i], &n, &err) < 0);
}

static void uints(void **state)
{
	uint64_t n = 0;
	struct err err = {0};
	(void)state;

	assert_int_equal(parse_uint("32", 1, 32, &n, &err), 0);
	assert_int_equal(n, 32);
	assert_int_equal(parse_uint("33", 1, 32, &n, &err), -ERANGE);
	assert_int_equal(parse_uint("0", 1, 32, &n, &err), -ERANGE);
	assert_int_equal(parse_uint("1x", 1, 32, &n, &err), -EINVAL);
	assert_int_equal(parse_uint("18446744073709551616", 0, UINT64_MAX, &n, &err), -ERANGE);
	assert_int_equal(n, 32);
}

static int read_text(const char *text, struct config *config, struct err *err)
{
	char path[] = "/tmp/mayfly-test-XXXXXX";
	int fd = mkstemp(path), r;

	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, text, strlen(text)), 0);
	fd_close(&fd);
	r = config_read(path, config, err);
	unlink(path);
	return r;
}

static void good_file(void **state)
{
	struct config config;
	struct err err = {0};
	(void)state;

	assert_int_equal(read_text("; mine\n[machine]\nkernel = /k\ninitramfs=/i\nmemory = 1G\n"
				   "cpus = 4\nroot = disk\nappend = a=1 b\n[vsock]\ncid = 77\n",
				 &config, &err),
		0);
	assert_string_equal(config.kernel, "/k");
	assert_string_equal(config.initramfs, "/i");
	assert_int_equal(config.root, CONFIG_ROOT_DISK);
	assert_string_equal(config.append, "a=1 b");
	assert_true(config.memory_bytes == GIB);
	assert_int_equal(config.cpus, 4);
	assert_int_equal(config.cid, 77);
}

static void bad_files_name_the_line(void **state)
{
	static const struct {
		const char *text, *says;
	} bad[] = {
		{"[machine]\nkernal = /k\n", ":2: unknown key 'kernal' in [machine]"},
		{"[machine]\ncpus = 10000\n", ":2: cpus: 10000 is not between 1 and 32"},
		{"[machine]\ncpus = two\n", ":2: cpus: 'two' is not a number"},
		{"[machine]\n\nmemory = 1M\n", ":3: memory: 1M is too little"},
		{"[machine]\nmemory = 128\n", "write it like 512M or 2G"},
		{"[machine]\ncpus = 1\ncpus = 2\n", ":3: 'cpus' stands twice"},
		{"[machine]\nroot = vda\n", ":2: root: 'vda' is neither initramfs nor disk"},
		{"[machine]\ninit = systemd\n", ":2: init: 'systemd' is not a whole path"},
		{"[machine]\ninit = /sbin/init 1\n",
			":2: init: '/sbin/init 1' is not a whole path"},
		{"[vsock]\ncid = 2\n", ":2: cid: 2 is not between 3"},
		{"[machine\ncpus = 1\n", ":1: neither"},
		{"nonsense\n", ":1: neither"},
		{"cpus = 1\n", "unknown key 'cpus' in []"},
		{"[machine]\nappend = a\x01z\n", "control character"},
		{"[machine]\nkernel = vmlinux\n", "begin it with /"},
		{"[disk]\nfile = a.img\n", "begin it with /"},
		{"[disk]\nmode = rw\n", ":2: mode: 'rw' is none of overlay, raw, ro"},
		{"[disk]\nsize = 8\n", "write it like 512M or 2G"},
		{"[disk]\nops_per_s = 0\n", "not between 1 and"},
		{"[disk2]\nfile = /a\nfile = /a\n", ":3: 'file' stands twice"},
		{"[disk]\nfile = /a\n[disk5]\nfile = /b\n", "unknown key 'file' in [disk5]"},
		{"[net]\nmode = bridge\n", ":2: mode: 'bridge' is none of"},
		{"[net]\ntap = a-name-of-16-byte\n", ":2: tap: longer than 15"},
		{"[net]\nmac = 02:00:00:00:00\n", ":2: mac: '02:00:00:00:00' is not"},
		{"[net]\nmac = 03:00:00:00:00:01\n", "is not a station's"},
		{"[net]\nmac = 02:00:00:00:00:001\n", "is not a station's"},
		{"[net]\nmac = 2:0:0:0:0:1\n", "is not a station's"},
		{"[net]\naddress = 10.0.0.1\n", ":2: address: '10.0.0.1' is not an address with"},
		{"[net]\naddress = 10.0.0.1/33\n", "is not an address with"},
		{"[net]\naddress = 10.0.0.256/24\n", "'10.0.0.256' is not an IPv4"},
		{"[net]\naddress = /24\n", "is not an address with"},
		{"[net]\ngateway = there\n", ":2: gateway: 'there' is not an IPv4"},
		{"[net]\ndns = ::1\n", ":2: dns: '::1' is not an IPv4"},
		{"[net]\nbytes_per_s = fast\n", ":2: bytes_per_s: "},
		{"[net]\npackets_per_s = -1\n", ":2: packets_per_s: "},
		{"[limits]\ncpus = 0\n", ":2: cpus: '0' is no number of CPUs"},
		{"[limits]\ncpus = 1.5x\n", "is no number of CPUs"},
		{"[limits]\ncpus = nan\n", "is no number of CPUs"},
		{"[limits]\ncpu_weight = 10001\n", ":2: cpu_weight: "},
		{"[limits]\nmemory = much\n", ":2: memory: "},
		{"[limits]\nprocesses = 15\n", ":2: processes: "},
		{"[limits]\nio_weight = 0\n", ":2: io_weight: "},
		{"[disk1]\nfile = /a\n", "unknown key 'file' in [disk1]"},
	};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct config config = {.cpus = 99};
		struct err err = {0};

		assert_true(read_text(bad[i].text, &config, &err) < 0);
		if (!strstr(err.msg, bad[i].says))
			fail_msg("'%s' does not say '%s'", err.msg, bad[i].says);
		assert_int_equal(config.cpus, 99); // untouched
	}
}

static void written_files_read_back(void **state)
{
	char path[] = "/tmp/mayfly-test-XXXXXX";
	int fd = mkstemp(path);
	struct config a, b;
	struct err err = {0};
	(void)state;

	fd_close(&fd);
	unlink(path);
	config_defaults(&a);
	strcpy(a.kernel, "/some where; really/vmlinux");
	memset(a.initramfs, '/', sizeof(a.initramfs) - 1);
	strcpy(a.append, "x=1 y=\"a b\" ; z");
	a.cpus = 3;
	a.root = CONFIG_ROOT_DISK;
	strcpy(a.init, "/sbin/init");
	strcpy(a.disks[0].file, "/a disk.img");
	strcpy(a.disks[2].file, "/another, read-only");
	a.disks[2].mode = CONFIG_DISK_RO;
	a.disks[3] = (struct config_disk){
		.size_bytes = GIB, .quota_bytes = 3 * MIB, .bytes_per_s = 7 * KIB, .ops_per_s = 9};
	a.memory_bytes = 48 * MIB + 4096;
	a.net = (struct config_net){.mode = CONFIG_NET_TAP,
		.card = true,
		.tap = "tap0",
		.mac = "02:00:00:00:00:01",
		.address = "192.168.100.200/24",
		.gateway = "192.168.100.1",
		.dns = "9.9.9.9",
		.bytes_per_s = 10 * MIB,
		.packets_per_s = 1000};
	a.limits = (struct config_limits){.cpu_milli = 1050,
		.cpu_weight = 20,
		.memory_bytes = GIB,
		.processes = 64,
		.io_weight = 7};
	a.access = CONFIG_ACCESS_MANAGE;
	strcpy(a.folders, "/a b/, /c:rw");
	assert_int_equal(allow_parse("a.example *.b.example:8080 [::1]:22", &a.allow, &err), 0);
	assert_int_equal(allow_parse("api.example:443", &a.keep, &err), 0);
	assert_int_equal(config_write(path, &a, &err), 0);
	assert_int_equal(config_write(path, &a, &err), -EEXIST);
	assert_int_equal(config_read(path, &b, &err), 0);
	assert_memory_equal(&a, &b, sizeof(a));
	unlink(path);
}

static void folders_are_taken_apart(void **state)
{
	static const struct {
		const char *path;
		bool write;
	} wanted[] = {{"/", false}, {"/a b", true}, {"/c:rw/d", false}, {"/e", true}};
	struct config config = {0};
	struct config_folder folder;
	struct err err = {0};
	(void)state;

	assert_false(config_folder(&config, 0, &folder));
	assert_int_equal(
		config_set(&config, "mcp", "folders", " /,, /a b//:rw , /c:rw/d,/e:rw, ", &err), 0);
	for (unsigned int i = 0; i < ARRAY_SIZE(wanted); i++) {
		assert_true(config_folder(&config, i, &folder));
		assert_string_equal(folder.path, wanted[i].path);
		assert_int_equal(folder.write, wanted[i].write);
	}
	assert_false(config_folder(&config, ARRAY_SIZE(wanted), &folder));
	assert_int_equal(config_set(&config, "mcp", "folders", "/a,b", &err), -EINVAL);
	assert_non_null(strstr(err.msg, "'b'"));
	assert_int_equal(
		config_set(&config, "mcp", "folders", "/1,/2,/3,/4,/5,/6,/7,/8,/9", &err), -E2BIG);
	assert_int_equal(config_set(&config, "mcp", "folders", "/1,/2,/3,/4,/5,/6,/7,/8", &err), 0);
	assert_int_equal(config_set(&config, "mcp", "folders", ":rw", &err), -EINVAL);
	assert_int_equal(config_set(&config, "mcp", "folders", "", &err), 0);
	assert_false(config_folder(&config, 0, &folder));
}

static void check_edit(const char *before, const char *value, const char *after)
{
	char path[] = "/tmp/mayfly-config-XXXXXX";
	CLEANUP_FREE char *text = NULL;
	CLEANUP_FD int fd = mkstemp(path);
	struct config config;
	struct err err = {0};
	size_t len;

	assert_int_equal(fd_write_all(fd, before, strlen(before)), 0);
	if (!after) {
		assert_true(config_edit(path, "mcp", "access", value, &config, &err) < 0);
		assert_non_null(strstr(err.msg, value));
		after = before;
	} else if (config_edit(path, "mcp", "access", value, &config, &err) < 0) {
		fail_msg("%s", err.msg);
	} else {
		assert_string_equal(config_access_name(config.access), value);
	}
	assert_int_equal(fd_read_file(path, 4096, &text, &len, &err), 0);
	assert_string_equal(text, after);
	unlink(path);
}

static void one_key_is_edited(void **state)
{
	(void)state;
	check_edit("", "exec", "\n[mcp]\naccess = exec\n");
	check_edit("[machine]\ncpus = 2", "none", "[machine]\ncpus = 2\n\n[mcp]\naccess = none\n");
	check_edit("; mine\n[mcp]\naccess : exec\n; last", "manage",
		"; mine\n[mcp]\naccess = manage\n; last");
	check_edit("[mcp]\n\n[machine]\ncpus = 1\n", "exec",
		"[mcp]\naccess = exec\n\n[machine]\ncpus = 1\n");
	check_edit(" [mcp]\n\taccess = exec\n", "none", " [mcp]\naccess = none\n");
	check_edit("[machine]\ncpus = 1\n", "most", NULL);
}

static void a_key_has_its_line(void **state)
{
	static const char text[] = "; x\n[machine]\ncpus = 2\n\n [mcp]\n\taccess : none\nmemory\n";
	(void)state;

	assert_int_equal(config_line(text, "machine", "cpus"), 3);
	assert_int_equal(config_line(text, "mcp", "access"), 6);
	assert_int_equal(config_line(text, "machine", "memory"), 0);
	assert_int_equal(config_line(text, "mcp", "cpus"), 0);
	assert_int_equal(config_line("", "mcp", "access"), 0);
}

static void a_machine_has_one_mac(void **state)
{
	static const uint8_t set[] = {0x52, 0x54, 0, 0xab, 0xcd, 0xef};
	struct config_net net = {0};
	uint8_t a[6], b[6];
	(void)state;

	config_net_mac(&net, "/var/lib/mayfly/vms/one", a);
	config_net_mac(&net, "/var/lib/mayfly/vms/one", b);
	assert_memory_equal(a, b, 6);
	assert_int_equal(a[0], 2); // locally administered, one station
	config_net_mac(&net, "/var/lib/mayfly/vms/two", b);
	assert_memory_not_equal(a, b, 6);
	config_net_mac(&net, "/home/me/.local/state/mayfly/vms/one", b);
	assert_memory_not_equal(a, b, 6);
	strcpy(net.mac, "52:54:00:aB:cd:ef");
	config_net_mac(&net, "/var/lib/mayfly/vms/one", b);
	assert_memory_equal(b, set, 6);
}

// A card behind rules stays in the machine, whatever may go through it.
static void cards(void **state)
{
	static const enum config_net_mode modes[] = {CONFIG_NET_NONE, CONFIG_NET_ALLOWLIST,
		CONFIG_NET_NAT, CONFIG_NET_PASST, CONFIG_NET_TAP};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		struct config_net net = {.mode = modes[i]};

		assert_int_equal(config_net_has_rules(&net), i == 2);
		assert_int_equal(config_net_has_device(&net), i >= 2);
		net.card = true;
		assert_int_equal(config_net_has_rules(&net), i <= 2);
		assert_true(config_net_has_device(&net));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(sizes),
		cmocka_unit_test(durations),
		cmocka_unit_test(uints),
		cmocka_unit_test(good_file),
		cmocka_unit_test(bad_files_name_the_line),
		cmocka_unit_test(written_files_read_back),
		cmocka_unit_test(folders_are_taken_apart),
		cmocka_unit_test(one_key_is_edited),
		cmocka_unit_test(a_key_has_its_line),
		cmocka_unit_test(a_machine_has_one_mac),
		cmocka_unit_test(cards),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
