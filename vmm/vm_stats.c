// SPDX-License-Identifier: Apache-2.0
// What a machine and its devices have counted, as JSON; see the header. Loop thread.
#include "vmm/vm_stats.h"

#include <linux/virtio_ids.h>

#include "devices/virtio_balloon.h"
#include "devices/virtio_blk.h"
#include "devices/virtio_mmio.h"
#include "devices/virtio_net.h"
#include "devices/virtio_vsock.h"
#include "vmm/vm_private.h"

static void put(json_t *object, const char *key, uint64_t val)
{
	json_object_set_new(object, key, json_integer((json_int_t)val));
}

static void put_known(json_t *object, const char *key, uint64_t val)
{
	if (val != VIRTIO_BALLOON_UNKNOWN)
		put(object, key, val);
}

static void put_blk(json_t *out, struct virtio_dev *dev)
{
	struct virtio_blk_stats stats;

	virtio_blk_get_stats(dev, &stats);
	put(out, "reads", stats.reads);
	put(out, "writes", stats.writes);
	put(out, "flushes", stats.flushes);
	put(out, "discards", stats.discards);
	put(out, "read_bytes", stats.read_bytes);
	put(out, "written_bytes", stats.written_bytes);
	put(out, "copied_blocks", stats.copied);
	put(out, "errors", stats.errors);
}

static void put_net(json_t *out, struct virtio_dev *dev)
{
	struct virtio_net_stats stats;

	virtio_net_get_stats(dev, &stats);
	put(out, "rx_packets", stats.rx_packets);
	put(out, "rx_bytes", stats.rx_bytes);
	put(out, "rx_dropped", stats.rx_dropped);
	put(out, "tx_packets", stats.tx_packets);
	put(out, "tx_bytes", stats.tx_bytes);
	put(out, "tx_dropped", stats.tx_dropped);
	put(out, "link_up", stats.link_up);
}

static void put_vsock(json_t *out, struct virtio_dev *dev)
{
	struct virtio_vsock_stats stats;

	virtio_vsock_get_stats(dev, &stats);
	put(out, "from_guest_packets", stats.from_guest_packets);
	put(out, "from_guest_bytes", stats.from_guest_bytes);
	put(out, "to_guest_packets", stats.to_guest_packets);
	put(out, "to_guest_bytes", stats.to_guest_bytes);
	put(out, "credit_updates", stats.credit_updates);
	put(out, "dropped_packets", stats.dropped_packets);
	put(out, "connections", stats.nr_conns);
}

static void put_balloon(json_t *out, struct virtio_dev *dev)
{
	struct virtio_balloon_stats stats;

	virtio_balloon_get_stats(dev, &stats);
	put(out, "target_bytes", stats.target_bytes);
	put(out, "actual_bytes", stats.actual_bytes);
	put(out, "inflated_bytes", stats.inflated_bytes);
	put(out, "reported_bytes", stats.reported_bytes);
	put(out, "bad_pages", stats.bad_pages);
	if (!stats.updated_ns)
		return;
	put(out, "guest_age_ms", (now_ns() - stats.updated_ns) / 1000000);
	put_known(out, "guest_total_bytes", stats.total_bytes);
	put_known(out, "guest_free_bytes", stats.free_bytes);
	put_known(out, "guest_available_bytes", stats.available_bytes);
	put_known(out, "guest_caches_bytes", stats.caches_bytes);
	put_known(out, "guest_major_faults", stats.major_faults);
	put_known(out, "guest_minor_faults", stats.minor_faults);
	put_known(out, "guest_swap_in_bytes", stats.swap_in_bytes);
	put_known(out, "guest_swap_out_bytes", stats.swap_out_bytes);
}

json_t *vm_stats_json(struct vm *vm)
{
	json_t *out = json_object(), *exits = json_object();
	struct vm_stats stats;
	unsigned int disk = 0;

	vm_stats(vm, &stats);
	for (int kind = 0; kind < VCPU_EXIT_KINDS; kind++)
		put(exits, vcpu_exit_names[kind], stats.exits[kind]);
	json_object_set_new(out, "exits", exits);
	for (unsigned int i = 0; i < vm->nr_virtio; i++) {
		struct virtio_dev *dev = vm->virtio[i].dev;
		const char *name = dev->ops->name;
		json_t *device = json_object();

		put(device, "notifies", dev->nr_notifies);
		put(device, "interrupts", dev->nr_interrupts);
		switch (dev->ops->device_id) {
		case VIRTIO_ID_BLOCK:
			while (!config_has_disk(&vm->params.config->disks[disk]))
				disk++;
			name = config_disk_name(disk++);
			put_blk(device, dev);
			break;
		case VIRTIO_ID_NET:
			put_net(device, dev);
			break;
		case VIRTIO_ID_VSOCK:
			put_vsock(device, dev);
			break;
		case VIRTIO_ID_BALLOON:
			put_balloon(device, dev);
			// For whoever asks next.
			virtio_balloon_ask_stats(dev);
			break;
		default:
			break;
		}
		json_object_set_new(out, name, device);
	}
	return out;
}

int vm_set_balloon(struct vm *vm, json_int_t bytes, struct err *err)
{
	// The guest keeps some: what it cannot do without it takes back, but a target that cannot
	// be is more likely a slip.
	if (bytes < 0 || (uint64_t)bytes >= vm->params.config->memory_bytes)
		return err_set(err, -ERANGE,
			"the machine has %lluM, of which it can give up a part",
			(unsigned long long)(vm->params.config->memory_bytes / MIB));
	virtio_balloon_set_target(vm->balloon, (uint64_t)bytes);
	return 0;
}
