# SPDX-License-Identifier: Apache-2.0
# One non-recursive Makefile. `make help` lists the targets.

CONFIG ?= release
ARCH   := $(shell uname -m)
PREFIX ?= /usr/local
DESTDIR ?=
VERSION := 0.1.0

B := build/$(CONFIG)

# --- Tools and flags -------------------------------------------------------------------------

ifneq ($(filter fuzz,$(CONFIG)),)
CC := clang
endif
CC ?= cc
ifeq ($(origin CC),default)
CC := gcc
endif

WARN := -Wall -Wextra -Wshadow -Wvla -Wconversion -Wno-sign-conversion -Wmissing-prototypes \
	-Wstrict-prototypes -Wpointer-arith -Wundef -Wformat=2
HARDEN := -fstack-protector-strong -fno-common -fno-strict-aliasing -fcf-protection=none
OPT_release := -O2 -g1 -D_FORTIFY_SOURCE=2
OPT_debug   := -O0 -g3
OPT_asan    := -O1 -g2 -fsanitize=address -fno-omit-frame-pointer
OPT_ubsan   := -O1 -g2 -fsanitize=undefined -fno-sanitize-recover=all
OPT_tsan    := -O1 -g2 -fsanitize=thread
OPT_fuzz    := -O1 -g2 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined
OPT := $(OPT_$(CONFIG))
ifeq ($(OPT),)
$(error CONFIG=$(CONFIG) is none of release debug asan ubsan tsan fuzz)
endif

CPPFLAGS := -I. -I$(B)/gen -D_GNU_SOURCE -DMAYFLY_VERSION='"$(VERSION)"' -MMD -MP
CFLAGS   := -std=gnu17 $(OPT) $(WARN) $(HARDEN) -fPIE -ffunction-sections -fdata-sections \
	-fvisibility=hidden -pthread $(EXTRA_CFLAGS)
LDFLAGS  := $(filter -fsanitize=%,$(filter-out -fsanitize=fuzzer-no-link%,$(OPT))) -pie -pthread \
	-Wl,--gc-sections -Wl,-z,relro,-z,now -Wl,--as-needed $(EXTRA_LDFLAGS)
ifeq ($(CONFIG),fuzz)
LDFLAGS += -fsanitize=address,undefined
endif
LIBS := -luring -ljansson -linih -lnettle -lzstd -lmicrohttpd -lresolv \
	-lmbedtls -lmbedx509 -lmbedcrypto

# A program of many short-lived processes, one of them for each machine: static, so that none of
# them pays for the dynamic linker in time or memory. The sanitizers want theirs dynamic.
ifeq ($(CONFIG),release)
PROGRAM_LDFLAGS := -static-pie
endif

# The guest's programs are static and know nothing of the host's configuration, but are built
# with the same warnings. musl, because every page of the image is copied into every machine, and
# every system call before the first command is waited for: 70 KB and 2 calls of libc's own,
# against 670 KB and 12 of a static glibc.
GUEST_CC      := musl-gcc
GUEST_CFLAGS  := -std=gnu17 -Os -g1 $(WARN) $(HARDEN) -fno-pie -fno-asynchronous-unwind-tables \
	-ffunction-sections -fdata-sections -fvisibility=hidden -idirafter $(B)/gen/uapi
GUEST_LDFLAGS := -static -no-pie -Wl,--gc-sections -Wl,-z,norelro -s

Q := $(if $(V),,@)
say = @printf '  %-8s %s\n' $(1) $(2)

# --- Sources ---------------------------------------------------------------------------------

base_src    := $(wildcard vmm/base/*.c)
vmm_src     := $(wildcard vmm/*.c vmm/$(ARCH)/*.c)
devices_src := $(wildcard devices/*.c)
snapshot_src := $(wildcard snapshot/*.c)
cli_src     := $(wildcard cli/*.c)
mcp_src     := $(wildcard mcp/*.c)
work_src    := $(wildcard work/*.c)
egress_src  := $(wildcard egress/*.c)
proto_src   := $(wildcard guest/proto/*.c)
agent_src   := $(wildcard guest/*.c)

host_src := $(base_src) $(vmm_src) $(devices_src) $(snapshot_src) $(cli_src) $(mcp_src) $(work_src) \
	$(egress_src) $(proto_src)

obj = $(patsubst %.c,$(B)/%.o,$(filter %.c,$(1))) $(patsubst %.S,$(B)/%.o,$(filter %.S,$(1)))
guest_obj = $(patsubst %.c,$(B)/guest-obj/%.o,$(1))

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

include tests/tests.mk

# --- Products --------------------------------------------------------------------------------

.PHONY: all
all: $(B)/mayfly $(B)/mayfly-agent $(B)/initramfs.cpio

$(B)/%.o: %.c
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -c -o $@ $<

$(B)/guest-obj/%.o: %.c | $(B)/gen/uapi
	$(call say,CC,'$< (guest)')
	@mkdir -p $(@D)
	$(Q)$(GUEST_CC) $(CPPFLAGS) $(GUEST_CFLAGS) -c -o $@ $<

# musl-gcc hides all of /usr/include: the kernel's own headers are let through.
$(B)/gen/uapi:
	@mkdir -p $@
	@ln -sfn /usr/include/linux $@/linux && ln -sfn /usr/include/asm-generic $@/asm-generic && \
		ln -sfn /usr/include/$$(gcc -print-multiarch)/asm $@/asm

# The numbers and names of system calls, of the headers that we build with.
$(B)/gen/syscall_names.h:
	@mkdir -p $(@D)
	$(Q)echo '#include <asm/unistd.h>' | $(CC) -E -dM - | \
		sed -n 's/^#define __NR_\([a-z0-9_]*\) .*/{__NR_\1, "\1"},/p' | sort >$@

$(B)/vmm/jail_calls.o: $(B)/gen/syscall_names.h

$(B)/libbase.a: $(call obj,$(base_src))
	$(call say,AR,$@)
	$(Q)rm -f $@ && ar rcs $@ $^

# The default image is part of the program.
$(B)/builtin.o: images/builtin.S $(B)/initramfs.cpio
	$(call say,AS,$<)
	$(Q)$(CC) -c -o $@ -DINITRAMFS='"$(B)/initramfs.cpio"' $<

$(B)/mayfly: $(call obj,$(host_src)) $(B)/builtin.o
	$(call say,LD,$@)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) $(PROGRAM_LDFLAGS) -o $@ $^ $(LIBS)

$(B)/mayfly-agent: $(call guest_obj,$(agent_src) $(proto_src) $(base_src))
	$(call say,LD,'$@ (static)')
	$(Q)$(GUEST_CC) $(GUEST_CFLAGS) $(GUEST_LDFLAGS) -o $@ $^

$(B)/initramfs.cpio: images/initramfs.sh $(B)/mayfly-agent
	$(call say,CPIO,$@)
	$(Q)images/initramfs.sh $@ $(B)/mayfly-agent

# The guest kernel is built once and kept outside the tree; beside the program stand links to it.
.PHONY: kernel
kernel:
	@kernel-config/build.sh --flavour micro
	@mkdir -p $(B)
	@dir=$$(dirname "$$(kernel-config/build.sh --path micro)") && \
		ln -sfn "$$dir/vmlinux" $(B)/vmlinux && ln -sfn "$$dir/System.map" $(B)/System.map

# Beside it, the one for systemd and containers, which nothing but `--kernel standard` needs.
.PHONY: kernel-standard
kernel-standard:
	@kernel-config/build.sh --flavour standard
	@mkdir -p $(B)/standard
	@dir=$$(dirname "$$(kernel-config/build.sh --path standard)") && \
		for file in vmlinux System.map; do ln -sfn "$$dir/$$file" $(B)/standard/$$file; done

.PHONY: kernel-report
kernel-report: kernel all
	@MAYFLY=$(B)/mayfly kernel-config/build.sh --report micro

# --- What the build and the tests need of Debian ---------------------------------------------

DEPS_BUILD := gcc libc6-dev make patch musl-tools liburing-dev libjansson-dev libinih-dev libxxhash-dev libzstd-dev nettle-dev libmicrohttpd-dev libmbedtls-dev busybox-static cpio \
	linux-source-6.1 bc bison flex libelf-dev libssl-dev xz-utils kmod python3
DEPS_TEST  := libcmocka-dev qemu-system-x86 procps e2fsprogs erofs-utils fio iproute2 iperf3 passt nftables openssl libarchive-tools skopeo tmux \
	strace
DEPS_BENCH := gnuplot-nox qemu-system-x86 fio iperf3 dropbear-bin openssh-client cpio
DEPS_DEV   := clang clang-format clang-tidy libclang-rt-14-dev

.PHONY: deps deps-demo deps-bench deps-dev
deps-demo: ; @tests/deps.sh $(DEPS_BUILD) $(if $(wildcard /dev/kvm),,$(DEPS_TEST))
deps:      ; @tests/deps.sh $(DEPS_BUILD) $(DEPS_TEST)
deps-bench: ; @tests/deps.sh $(DEPS_BUILD) $(DEPS_BENCH)
deps-dev:  ; @tests/deps.sh $(DEPS_BUILD) $(DEPS_TEST) $(DEPS_DEV)

# --- Demo and tests --------------------------------------------------------------------------

.PHONY: demo
demo: deps-demo
	@$(MAKE) --no-print-directory kernel all
	@tests/demo.sh $(B)

# Everything: units and corpora, layering, then real guests on /dev/kvm, or in the lab without it.
.PHONY: test
test: deps
	@$(MAKE) --no-print-directory kernel
	@$(MAKE) --no-print-directory all check-unit check-layers
	@$(MAKE) --no-print-directory check-guest

.PHONY: check-guest
check-guest: all $(guest_programs) $(kvm_bins)
	@tests/run-guest.sh $(B)

# The same guest tests on a real kvm_amd, inside an emulated machine.
.PHONY: test-lab
test-lab: deps kernel all $(guest_programs) $(kvm_bins)
	@tests/lab/lab-test
	@tests/run-guest.sh --lab $(B) $(LAB_TESTS)

# systemd, and a container under it, on the standard kernel. The image comes over the network.
STANDARD_PACKAGES := systemd-sysv,dbus,udev,crun,busybox-static,iproute2,nftables,iptables
.PHONY: test-standard
test-standard: deps kernel kernel-standard all
	@command -v mmdebstrap >/dev/null || tests/deps.sh mmdebstrap
	@export MAYFLY_HOME=$(CURDIR)/$(B)/standard; $(B)/mayfly image inspect server >/dev/null 2>&1 || \
		$(B)/mayfly image build debian-12 --name server --packages $(STANDARD_PACKAGES)
	@tests/lab/lab run --own --timeout 3000 --memory 4096 --env MAYFLY_HOME=/tmp/mayfly-home --env FULL=1 \
		--cwd $(CURDIR) -- tests/run-guest.sh $(B) standard

.PHONY: check-asan check-ubsan check-tsan
check-asan check-ubsan check-tsan: check-%:
	@TSAN_OPTIONS=suppressions=$(CURDIR)/tests/support/tsan-suppressions.txt \
		$(MAKE) --no-print-directory CONFIG=$* check-unit

# Fuzzes every parser, or FUZZ=name, for FUZZ_SECONDS each; new inputs stay in build/fuzz.
FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz:
	@$(MAKE) --no-print-directory CONFIG=fuzz run-fuzz

.PHONY: run-fuzz
run-fuzz: $(fuzz_bins)
	@for f in $(if $(FUZZ),$(filter %/$(FUZZ)_fuzz,$(fuzz_bins)),$(fuzz_bins)); do \
		name=$$(basename $$f _fuzz); mkdir -p $(B)/corpus/$$name; \
		echo "fuzzing $$name for $(FUZZ_SECONDS) s"; \
		$$f -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=1024 -print_final_stats=1 \
			-artifact_prefix=$(B)/ $(B)/corpus/$$name tests/fuzz/corpus/$$name \
			>$(B)/$$name.log 2>&1 || { tail -n 40 $(B)/$$name.log; exit 1; }; \
		grep -E 'number_of_executed_units|Done ' $(B)/$$name.log; \
	done

# All that this host can measure, into bench/results: raw samples, and a report with plots.
.PHONY: bench bench-lab
bench: deps-bench
	@$(MAKE) --no-print-directory kernel all
	@bench/report.py $(BENCH_OPTIONS) $(B)

# The same in the emulated AMD host, where QEMU's guests run beside ours.
bench-lab: deps-bench
	@mkdir -p bench/results
	@$(MAKE) --no-print-directory kernel all $(guest_programs)
	@tests/lab/lab run --own --timeout 14000 --memory 6144 --share $(CURDIR)/bench/results --cwd $(CURDIR) -- \
		bench/report.py --out /lab --at-once 1,10 --sizes 64,256,1024 $(BENCH_OPTIONS) $(B)

# What can be counted must stay within bench/budgets.json.
.PHONY: check-budgets
check-budgets: kernel all
	@bench/budgets.py $(B)

.PHONY: bench-exec
bench-exec: kernel all
	@bench/exec.py $(B)/mayfly

# Side by side with QEMU, which is why they run in the lab: ours runs where QEMU does not.
.PHONY: bench-disk bench-net
bench-disk bench-net: bench-%: kernel all $(guest_programs)
	@tests/lab/lab run --own --timeout 3000 --memory 3072 --cpus 2 --cwd $(CURDIR) -- bench/$*.py $(B)

.PHONY: bench-snapshot
bench-snapshot: kernel all
	@bench/snapshot.py $(B)/mayfly

# Official suites and clients of MCP, from npm, which is why CI leaves them out.
.PHONY: check-mcp-conformance
check-mcp-conformance: all
	@command -v npm >/dev/null || tests/deps.sh nodejs npm
	@tests/mcp/conformance.sh $(B)

.PHONY: check-mcp-clients
check-mcp-clients: kernel all
	@command -v npm >/dev/null || tests/deps.sh nodejs npm
	@tests/mcp/clients.sh $(B)

# Everything that CI runs.
.PHONY: ci
ci: ; @.ci/run

# --- Checks of the source --------------------------------------------------------------------

our_files := $(shell git ls-files '*.c' '*.h' 2>/dev/null)

.PHONY: tidy format check-format check-layers compdb
tidy: compdb
	@# A file at a time: with several, its analyzer loses track of va_start().
	@printf '%s\n' $(filter %.c,$(filter-out tests/% guest/%,$(our_files))) | \
		xargs -n 1 -P 2 clang-tidy --quiet -p . 2>/dev/null

format:
	@clang-format -i $(our_files)

check-format:
	@clang-format --dry-run --Werror $(our_files)

# Who may include whom: see CONTRIBUTING.md.
check-layers:
	@tests/check-layers.sh

compdb: $(B)/gen/syscall_names.h
	@tests/compdb.py $(CC) -- $(CPPFLAGS) $(CFLAGS) -- $(host_src) $(agent_src) >compile_commands.json

# --- Installing ------------------------------------------------------------------------------

.PHONY: install uninstall dist clean
install: all kernel
	install -D -m 0755 $(B)/mayfly $(DESTDIR)$(PREFIX)/bin/mayfly
	install -D -m 0644 $(B)/vmlinux $(DESTDIR)$(PREFIX)/lib/mayfly/vmlinux
	install -D -m 0644 $(B)/System.map $(DESTDIR)$(PREFIX)/lib/mayfly/System.map
	@if [ -e $(B)/standard/vmlinux ]; then for file in vmlinux System.map; do set -x; \
		install -D -m 0644 $(B)/standard/$$file $(DESTDIR)$(PREFIX)/lib/mayfly/standard/$$file; done; fi
	install -D -m 0755 $(B)/mayfly-agent $(DESTDIR)$(PREFIX)/lib/mayfly/mayfly-agent
	install -D -m 0644 guest/mayfly-agent.service $(DESTDIR)$(PREFIX)/lib/mayfly/mayfly-agent.service
	install -D -m 0644 docs/mayfly.1 $(DESTDIR)$(PREFIX)/share/man/man1/mayfly.1
	install -D -m 0644 cli/completion.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/mayfly
	install -D -m 0644 cli/completion.zsh $(DESTDIR)$(PREFIX)/share/zsh/vendor-completions/_mayfly
	install -D -m 0644 cli/completion.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/mayfly.fish
	install -D -m 0644 cli/mayfly@.service $(DESTDIR)$(PREFIX)/lib/systemd/system/mayfly@.service

uninstall:
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/,bin/mayfly share/man/man1/mayfly.1 \
		share/bash-completion/completions/mayfly share/zsh/vendor-completions/_mayfly \
		share/fish/vendor_completions.d/mayfly.fish lib/systemd/system/mayfly@.service)
	rm -rf $(DESTDIR)$(PREFIX)/lib/mayfly

# What install installs, as a package of Debian's.
.PHONY: deb
deb:
	@rm -rf $(B)/deb
	@$(MAKE) --no-print-directory install PREFIX=/usr DESTDIR=$(B)/deb >/dev/null
	@images/deb.sh $(VERSION) $(B)/deb $(B)/mayfly_$(VERSION)_$$(dpkg --print-architecture).deb

dist:
	git archive --prefix=mayfly-$(VERSION)/ -o mayfly-$(VERSION).tar.gz HEAD

clean:
	rm -rf build compile_commands.json

.PHONY: help
help:
	@echo 'make demo            install what is missing, build, boot a machine, show the timings'
	@echo 'make test            unit tests, fuzzer corpora, real guests (in the lab without /dev/kvm)'
	@echo 'make                 build $(B)/mayfly'
	@echo 'make kernel          build the guest kernel, or find it in the cache'
	@echo 'make kernel-standard the one for systemd and containers;  test-standard tries it, in the lab'
	@echo 'make kernel-report   its size, its initcalls and what they cost'
	@echo 'make deps            install what building and testing need (deps-dev: and checking)'
	@echo 'make check-unit      unit tests and corpora;  check-asan check-ubsan check-tsan: so built'
	@echo 'make check-faults    each system call and allocation of each verb fails in turn (check-unit does it too)'
	@echo 'make check-kvm       the KVM side, on guests of a few instructions (check-guest does it too)'
	@echo 'make check-guest     tests on real guests;    test-lab: on an emulated AMD host'
	@echo 'make bench           measure all that this host can; a report with plots in bench/results'
	@echo 'make bench-lab       the same in the lab, beside QEMU;  bench-exec, bench-snapshot: a part alone'
	@echo 'make check-budgets   exits, system calls, packets, bytes: within bench/budgets.json'
	@echo 'make bench-disk      disks beside QEMU, in the lab;  bench-net: networks and vsock'
	@echo 'make fuzz            FUZZ=name FUZZ_SECONDS=60'
	@echo 'make tidy            clang-tidy; check-format, format, check-layers, compdb'
	@echo 'make ci              what CI runs'
	@echo 'make install         PREFIX=$(PREFIX) DESTDIR=;  uninstall, deb, dist, clean'
	@echo 'Variables: CONFIG=release|debug|asan|ubsan|tsan|fuzz CC=gcc|clang V=1'

-include $(shell find $(B) -name '*.d' -type f 2>/dev/null)
