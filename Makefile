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
LIBS := -luring -ljansson -linih -lfdt

# The guest's programs are static and know nothing of the host's configuration, but are built
# with the same warnings.
GUEST_CFLAGS  := -std=gnu17 -Os -g1 $(WARN) $(HARDEN) -D_FORTIFY_SOURCE=2 -ffunction-sections \
	-fdata-sections -fvisibility=hidden
GUEST_LDFLAGS := -static -Wl,--gc-sections -Wl,-z,norelro -s

Q := $(if $(V),,@)
say = @printf '  %-8s %s\n' $(1) $(2)

# --- Sources ---------------------------------------------------------------------------------

base_src    := $(wildcard vmm/base/*.c)
vmm_src     := $(wildcard vmm/*.c vmm/$(ARCH)/*.c)
devices_src := $(wildcard devices/*.c)
cli_src     := $(wildcard cli/*.c)
proto_src   := $(wildcard guest/proto/*.c)
agent_src   := $(wildcard guest/*.c)

host_src := $(base_src) $(vmm_src) $(devices_src) $(cli_src) $(proto_src)

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

$(B)/guest-obj/%.o: %.c
	$(call say,CC,'$< (guest)')
	@mkdir -p $(@D)
	$(Q)$(CC) $(CPPFLAGS) $(GUEST_CFLAGS) -c -o $@ $<

$(B)/libbase.a: $(call obj,$(base_src))
	$(call say,AR,$@)
	$(Q)rm -f $@ && ar rcs $@ $^

$(B)/mayfly: $(call obj,$(host_src))
	$(call say,LD,$@)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(LIBS)

$(B)/mayfly-agent: $(call guest_obj,$(agent_src) $(proto_src) $(base_src))
	$(call say,LD,'$@ (static)')
	$(Q)$(CC) $(GUEST_CFLAGS) $(GUEST_LDFLAGS) -o $@ $^ -ljansson

$(B)/initramfs.cpio: images/initramfs.sh $(B)/mayfly-agent
	$(call say,CPIO,$@)
	$(Q)images/initramfs.sh $@ $(B)/mayfly-agent

-include $(shell find $(B) -name '*.d' 2>/dev/null)
