# SPDX-License-Identifier: Apache-2.0
# What each unit test and fuzzer links, besides its own source and vmm/base: the module under test
# and what that may know, nothing else, so that the linker proves the layering.
#
#   unit_NAME = sources      tests/unit/NAME_test.c     (cmocka)
#   kvm_NAME  = sources      tests/kvm/NAME_test.c      (cmocka, on /dev/kvm)
#   fuzz_NAME = sources      tests/fuzz/NAME_fuzz.c     (libFuzzer; its corpus, in
#                                                        tests/fuzz/corpus/NAME, replays in `make test`)

comma := ,
unit_base      =
unit_state     =
unit_unix_sock =
unit_lock      =
unit_guest_mem = vmm/guest_mem.c
unit_bus       = vmm/bus.c
unit_loop      = vmm/loop.c
unit_loop_libs = -luring
unit_config    = vmm/config.c
unit_config_libs = -linih
unit_passt     = vmm/passt.c
unit_serial    = devices/serial.c vmm/loop.c
unit_serial_libs = -luring
unit_i8042     = devices/i8042.c
unit_rate_limit = devices/rate_limit.c
unit_virtqueue = devices/virtqueue.c vmm/guest_mem.c

# A virtio device, and the driver that drives it.
virtio_dev = devices/virtio_mmio.c devices/virtqueue.c vmm/guest_mem.c vmm/loop.c \
	tests/support/fake_driver.c
blk_mod = devices/virtio_blk.c devices/overlay.c devices/rate_limit.c
unit_virtio_mmio = $(virtio_dev) tests/support/device_suite.c
unit_virtio_mmio_libs = -luring
unit_virtio_rng = devices/virtio_rng.c $(virtio_dev) tests/support/device_suite.c
unit_virtio_rng_libs = -luring
unit_virtio_balloon = devices/virtio_balloon.c $(virtio_dev) tests/support/device_suite.c
unit_virtio_balloon_libs = -luring
unit_virtio_net = devices/virtio_net.c devices/rate_limit.c $(virtio_dev) tests/support/device_suite.c
unit_virtio_net_libs = -luring
unit_virtio_blk = $(blk_mod) tests/support/faulty_ring.c $(virtio_dev) tests/support/device_suite.c
unit_overlay = devices/overlay.c
unit_overlay_libs = $(patsubst %,-Wl$(comma)--wrap=%,pwrite fdatasync fsync linkat renameat ftruncate calloc)
unit_overlay_disk = $(blk_mod) tests/support/faulty_ring.c $(virtio_dev) tests/support/device_suite.c
unit_overlay_disk_libs = -luring -Wl,--wrap=loop_sqe,--wrap=loop_turn
unit_virtio_blk_libs = -luring -Wl,--wrap=loop_sqe,--wrap=loop_turn
unit_virtio_vsock = devices/virtio_vsock.c $(virtio_dev) tests/support/device_suite.c
unit_virtio_vsock_libs = -luring
unit_cgroup    = vmm/cgroup.c
unit_cgroup_libs = -ljansson
unit_jail      = vmm/jail.c vmm/jail_calls.c
unit_cmdline   = vmm/cmdline.c
unit_control   = vmm/control.c vmm/loop.c
unit_control_libs = -luring -ljansson
unit_image     = snapshot/image.c
unit_lazy      = snapshot/lazy.c $(snapshot_mod)
unit_lazy_libs = -lzstd
unit_working_set = snapshot/working_set.c snapshot/image.c
unit_layers    = cli/layers.c devices/overlay.c snapshot/image.c vmm/config.c
unit_layers_libs = -linih
unit_golden    = cli/golden.c cli/control_client.c cli/home.c cli/layers.c devices/overlay.c \
	vmm/config.c snapshot/image.c
unit_golden_libs = -ljansson -linih
unit_pool      = cli/pool_store.c cli/pool_serve.c cli/home.c vmm/config.c
unit_pool_libs = -ljansson -linih
unit_patience  = cli/patience.c
unit_eval_task = cli/eval_task.c
unit_eval_task_libs = -ljansson
unit_store     = cli/store.c cli/home.c vmm/config.c snapshot/image.c
unit_store_libs = -ljansson -linih
snapshot_mod   = snapshot/chain.c snapshot/memory.c snapshot/image.c vmm/guest_mem.c
unit_memory    = $(snapshot_mod)
unit_memory_libs = -lzstd -Wl,--wrap=pwrite,--wrap=ftruncate
unit_loader    = tests/support/kernel_image.c vmm/loader.c vmm/guest_mem.c vmm/x86_64/bzimage.c
unit_mptable   = vmm/x86_64/mptable.c vmm/x86_64/layout.c vmm/guest_mem.c
unit_boot_params = tests/support/kernel_image.c vmm/loader.c vmm/guest_mem.c vmm/x86_64/boot.c \
	vmm/x86_64/boot_params.c vmm/x86_64/bzimage.c vmm/x86_64/layout.c vmm/x86_64/mptable.c
unit_insn      = tests/support/native.c vmm/x86_64/insn.c
unit_walk      = vmm/x86_64/walk.c vmm/guest_mem.c
unit_assist    = tests/support/native.c vmm/x86_64/assist.c vmm/x86_64/insn.c vmm/x86_64/walk.c \
	vmm/guest_mem.c
unit_cpuid     = vmm/x86_64/cpuid.c
unit_state_x86 = vmm/x86_64/state_x86.c
unit_symbols   = vmm/symbols.c
# The two ends of the agent protocol. The agent starts real processes of this host.
proto_mod      = guest/proto/frame.c guest/proto/json.c
agent_mod      = $(proto_mod) guest/agent.c guest/session.c guest/request.c guest/spawn.c \
	guest/tree.c guest/user.c guest/net.c guest/wake.c guest/facts.c guest/task.c guest/job.c \
	guest/port.c
unit_proto     = $(proto_mod)
tree_mod       = guest/proto/tree_send.c guest/proto/tree_receive.c
unit_tree      = $(proto_mod) $(tree_mod)
unit_agent     = $(agent_mod)
fake_guest     = tests/support/fake_guest.c guest/files.c guest/watch.c cli/agent_client.c $(tree_mod) $(agent_mod)
unit_agent_client = $(fake_guest)
unit_agent_files = cli/agent_files.c $(fake_guest)
unit_copy      = cli/copy.c cli/patience.c cli/agent_files.c $(fake_guest)
work_mod       = $(wildcard work/*.c)
unit_work      = $(work_mod)
unit_work_libs = -lnettle
unit_forward   = cli/forward.c
unit_scrollback = cli/scrollback.c
unit_tool      = cli/tool.c
unit_oci       = cli/oci.c
unit_oci_libs  = -ljansson -lnettle
rootfs_store_mod = cli/rootfs_store.c cli/home.c cli/store.c vmm/config.c snapshot/image.c
unit_work_ini  = cli/work_ini.c cli/machine_options.c $(work_mod) $(rootfs_store_mod)
unit_work_ini_libs = -ljansson -linih -lnettle
unit_rootfs_store = $(rootfs_store_mod)
unit_rootfs_store_libs = -ljansson -linih -lnettle

# A machine's MCP endpoint, with a real agent behind it.
mcp_mod        = $(filter-out mcp/http.c mcp/http_tls.c mcp/no_tls.c,$(wildcard mcp/*.c)) vmm/config.c cli/agent_files.c cli/control_client.c
mcp_libs       = -ljansson -linih -lnettle
unit_mcp_session = $(mcp_mod) tests/support/mcp_client.c $(fake_guest)
unit_mcp_session_libs = $(mcp_libs)
unit_mcp_http  = mcp/http.c mcp/http_tls.c $(mcp_mod) tests/support/mcp_client.c tests/support/tls_server.c $(fake_guest)
unit_mcp_http_libs = $(mcp_libs) -lmicrohttpd $(tls_libs)
unit_mcp_approvals = mcp/approvals.c mcp/redact.c mcp/text.c
unit_mcp_approvals_libs = -ljansson -lnettle -Wl,--wrap=time
unit_replay_page = cli/replay_page.c
unit_replay_page_libs = -ljansson -lnettle
unit_mcp_clients = mcp/clients.c
unit_mcp_clients_libs = -ljansson
unit_mcp_audit = mcp/audit.c mcp/redact.c mcp/text.c
unit_mcp_audit_libs = -ljansson -lnettle

tls_libs       = -lmbedtls -lmbedx509 -lmbedcrypto
unit_allow     = vmm/allow.c
unit_egress_address = egress/address.c
unit_egress_http = egress/http.c vmm/allow.c
unit_nat_rules = egress/nat_rules.c egress/address.c vmm/allow.c
unit_egress_hello = egress/hello.c
unit_egress_resolve = egress/resolve.c egress/address.c
unit_egress_resolve_libs = -lresolv
unit_egress_confine = egress/confine.c
unit_egress_proxy = $(filter-out egress/confine.c,$(wildcard egress/*.c)) vmm/allow.c \
	tests/support/tls_server.c
unit_egress_proxy_libs = -ljansson -lnettle -lresolv $(tls_libs)
unit_egress_tls = egress/tls.c tests/support/tls_server.c
unit_egress_tls_libs = $(tls_libs)
unit_egress_secret = egress/secret.c vmm/allow.c
unit_egress_secret_libs = -ljansson -lnettle

kvm_vcpu   = tests/kvm/box.c tests/kvm/vcpu_delayed.c vmm/kvm.c vmm/guest_mem.c vmm/bus.c \
	vmm/loader.c $(addprefix vmm/x86_64/,assist.c boot.c boot_params.c bzimage.c cpuid.c \
	insn.c kvm_state.c kvm_x86.c layout.c mptable.c state_x86.c vcpu_state.c vcpu_x86.c walk.c)
kvm_state  = vmm/vcpu.c $(filter-out tests/kvm/vcpu_delayed.c,$(kvm_vcpu))
# The whole monitor but its process; its calls of the system go through wrap.c.
kvm_vm     = tests/kvm/box.c tests/kvm/wrap.c tests/support/kernel_image.c \
	$(filter-out vmm/monitor.c vmm/control.c vmm/vm_stats.c,$(vmm_src)) $(devices_src) $(snapshot_src)
kvm_vm_libs = -luring -linih -lzstd $(patsubst %,-Wl$(comma)--wrap=%,ioctl open fcntl eventfd socket bind \
	listen fchmod fstat sigaction pread mmap calloc malloc strdup \
	realloc aligned_alloc pthread_create io_uring_queue_init)

fuzz_loader = tests/support/kernel_image.c vmm/loader.c vmm/guest_mem.c vmm/x86_64/boot.c \
	vmm/x86_64/boot_params.c vmm/x86_64/bzimage.c vmm/x86_64/layout.c vmm/x86_64/mptable.c
fuzz_state  =
fuzz_control = vmm/control.c vmm/loop.c
fuzz_control_libs = -luring -ljansson
fuzz_eval_task = cli/eval_task.c
fuzz_eval_task_libs = -ljansson
fuzz_store  = cli/store.c cli/home.c vmm/config.c snapshot/image.c
fuzz_store_libs = -ljansson -linih
fuzz_snapshot = $(snapshot_mod)
fuzz_snapshot_libs = -lzstd
fuzz_working_set = snapshot/working_set.c snapshot/image.c
fuzz_vcpu_state = vmm/x86_64/state_x86.c vmm/x86_64/cpuid.c
fuzz_virtio_state = devices/virtio_rng.c devices/virtio_balloon.c devices/virtio_blk.c \
	devices/virtio_net.c devices/virtio_vsock.c devices/rate_limit.c devices/overlay.c \
	$(virtio_dev)
fuzz_virtio_state_libs = -luring
fuzz_virtqueue = devices/virtqueue.c vmm/guest_mem.c
fuzz_virtio_mmio = devices/virtio_rng.c $(virtio_dev)
fuzz_virtio_mmio_libs = -luring -Wl,--wrap=getrandom
fuzz_virtio_blk = $(blk_mod) $(virtio_dev)
fuzz_virtio_blk_libs = -luring
fuzz_virtio_net = devices/virtio_net.c devices/rate_limit.c $(virtio_dev)
fuzz_virtio_net_libs = -luring
fuzz_overlay = devices/overlay.c
fuzz_virtio_vsock = devices/virtio_vsock.c $(virtio_dev)
fuzz_virtio_vsock_libs = -luring
fuzz_rootfs = cli/oci.c $(rootfs_store_mod)
fuzz_rootfs_libs = -ljansson -linih -lnettle
fuzz_work   = $(work_mod)
fuzz_work_libs = -lnettle
fuzz_egress_http = egress/http.c vmm/allow.c
fuzz_egress_hello = egress/hello.c
fuzz_insn   = vmm/x86_64/insn.c
fuzz_proto  = $(proto_mod)
fuzz_tree   = $(proto_mod) $(tree_mod)
fuzz_agent  = $(filter-out guest/spawn.c guest/tree.c guest/wake.c guest/port.c,$(agent_mod))
fuzz_agent_client = $(proto_mod) cli/agent_client.c
fuzz_agent_files = $(proto_mod) $(tree_mod) cli/agent_files.c cli/agent_client.c

fuzz_mcp    = $(mcp_mod) cli/agent_client.c $(proto_mod) $(tree_mod)
fuzz_mcp_libs = $(mcp_libs)
fuzz_http_check = mcp/http_check.c
fuzz_http_check_libs = -lnettle

# Programs of the tests on real guests, most of them for inside: static, one source each.
guest_programs := $(addprefix $(B)/tests/guest/,kill_at stream) \
	$(if $(filter x86_64,$(ARCH)),$(addprefix $(B)/tests/guest/,avx_pair syscalls) \
	$(B)/tests/escape/hostile)

# --- Rules -----------------------------------------------------------------------------------

unit_names := $(patsubst unit_%,%,$(filter unit_%,$(filter-out unit_names unit_bins unit_rule unit_%_libs,$(.VARIABLES))))
fuzz_names := $(patsubst fuzz_%,%,$(filter fuzz_%,$(filter-out fuzz_names fuzz_bins fuzz_main fuzz_rule fuzz_%_libs,$(.VARIABLES))))

# The configuration has the list of what a machine may reach in it.
whole = $(1) $(if $(filter vmm/config.c,$(1)),$(filter-out $(1),vmm/allow.c))

define unit_rule
$(B)/tests/unit/$(1)_test: $(call obj,tests/unit/$(1)_test.c $(call whole,$(unit_$(1)))) $(B)/libbase.a
	$$(call say,LD,$$@)
	$$(Q)$$(CC) $$(CFLAGS) $$(LDFLAGS) -o $$@ $$^ $$(unit_$(1)_libs) -lcmocka
unit_bins += $(B)/tests/unit/$(1)_test
endef
$(foreach name,$(unit_names),$(eval $(call unit_rule,$(name))))

kvm_names := $(patsubst kvm_%,%,$(filter kvm_%,$(filter-out kvm_names kvm_bins kvm_rule kvm_%_libs,$(.VARIABLES))))

define kvm_rule
$(B)/tests/kvm/$(1)_test: $(call obj,tests/kvm/$(1)_test.c $(kvm_$(1))) $(B)/libbase.a
	$$(call say,LD,$$@)
	$$(Q)$$(CC) $$(CFLAGS) $$(LDFLAGS) -o $$@ $$^ $$(kvm_$(1)_libs) -lcmocka
kvm_bins += $(B)/tests/kvm/$(1)_test
endef
$(foreach name,$(kvm_names),$(eval $(call kvm_rule,$(name))))

# In the fuzz configuration libFuzzer brings main(); in all others a small one replays files.
ifeq ($(CONFIG),fuzz)
fuzz_main := -fsanitize=fuzzer
else
fuzz_main := $(B)/tests/fuzz/replay.o
endif

define fuzz_rule
$(B)/tests/fuzz/$(1)_fuzz: $(call obj,tests/fuzz/$(1)_fuzz.c $(call whole,$(fuzz_$(1)))) $(B)/libbase.a $(filter %.o,$(fuzz_main))
	$$(call say,LD,$$@)
	$$(Q)$$(CC) $$(CFLAGS) $$(LDFLAGS) -o $$@ $$^ $(filter -%,$(fuzz_main)) $$(fuzz_$(1)_libs)
fuzz_bins += $(B)/tests/fuzz/$(1)_fuzz
endef
$(foreach name,$(fuzz_names),$(eval $(call fuzz_rule,$(name))))

$(B)/tests/guest/%: tests/guest/%.c | $(B)/gen/uapi
	$(call say,CC,'$< (guest)')
	@mkdir -p $(@D)
	$(Q)$(GUEST_CC) $(CPPFLAGS) $(GUEST_CFLAGS) $(GUEST_LDFLAGS) -pthread -o $@ $<

# A kernel of its own.
$(B)/tests/escape/hostile: tests/escape/hostile.c
	$(call say,CC,'$< (kernel)')
	@mkdir -p $(@D)
	$(Q)$(CC) $(CPPFLAGS) -std=gnu17 -O2 $(WARN) -ffreestanding -fno-pic -fno-stack-protector \
		-fcf-protection=none -mno-red-zone -mgeneral-regs-only -nostdlib -static -no-pie \
		-Wl,--build-id=none -Wl,-z,noexecstack -Wl,-Ttext-segment=0x1000000 -o $@ $<

# Faults of the host, for each verb that needs no guest, or FAULTS=VERB. The program is linked dynamically,
# for an allocator of ours; sanitizers have their own.
faults_bins := $(if $(filter x86_64,$(ARCH)),$(B)/tests/faults/mayfly $(B)/tests/faults/faults)
run_faults = MAYFLY_KERNEL=$(B)/mayfly $(B)/tests/faults/faults $(CURDIR)/$(B)/tests/faults/mayfly $(FAULTS)

$(B)/tests/faults/mayfly: $(call obj,$(host_src) tests/faults/faulty_alloc.c) $(B)/builtin.o
	$(call say,LD,$@)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(filter-out -pie,$(LDFLAGS)) -no-pie -o $@ $^ $(LIBS)

$(B)/tests/faults/faults: $(call obj,tests/faults/faults.c)
	$(call say,LD,$@)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^

.PHONY: check-unit
check-unit: $(unit_bins) $(fuzz_bins) $(if $(filter release,$(CONFIG)),$(faults_bins))
	@tests/run-unit.sh $(unit_bins)
	@tests/run-corpus.sh $(fuzz_bins)
	@$(if $(filter release,$(CONFIG)),$(run_faults))

.PHONY: check-faults
check-faults: $(faults_bins)
	@$(run_faults)

.PHONY: check-kvm
check-kvm: $(kvm_bins)
	@tests/run-unit.sh $(kvm_bins)
