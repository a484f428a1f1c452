// SPDX-License-Identifier: Apache-2.0
// Sets eth0; see the header. A few system calls instead of a DHCP client. The agent's only thread.
#include "guest/net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <net/route.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"
#include "vmm/base/util.h"

#define IFNAME "eth0"

static void failed(const char *what)
{
	log_line(LOG_WARN, "agent", IFNAME ": %s: %s", what, strerror(errno));
}

static bool put_ip(struct sockaddr *addr, const char *text)
{
	struct sockaddr_in in = {.sin_family = AF_INET};

	if (inet_pton(AF_INET, text, &in.sin_addr) != 1)
		return false;
	memcpy(addr, &in, sizeof(in));
	return true;
}

static void put_mask(struct sockaddr *addr, unsigned int bits)
{
	struct sockaddr_in in = {
		.sin_family = AF_INET,
		.sin_addr.s_addr = bits ? htonl(UINT32_MAX << (32 - MIN(bits, 32U))) : 0,
	};

	memcpy(addr, &in, sizeof(in));
}

static void set_address(int fd, char *address)
{
	struct ifreq ifr = {.ifr_name = IFNAME};
	char *bits = strchr(address, '/');

	if (bits)
		*bits++ = '\0';
	if (!put_ip(&ifr.ifr_addr, address) || ioctl(fd, SIOCSIFADDR, &ifr) < 0) {
		failed(address);
		return;
	}
	put_mask(&ifr.ifr_netmask, bits ? (unsigned int)strtoul(bits, NULL, 10) : 24U);
	if (ioctl(fd, SIOCSIFNETMASK, &ifr) < 0)
		failed("netmask");
}

static void add_default_route(int fd, const char *gateway)
{
	static char ifname[] = IFNAME;
	struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY, .rt_dev = ifname};

	put_mask(&route.rt_dst, 0);
	put_mask(&route.rt_genmask, 0);
	if (!put_ip(&route.rt_gateway, gateway) || ioctl(fd, SIOCADDRT, &route) < 0)
		failed(gateway);
}

static void write_resolv_conf(const char *dns)
{
	CLEANUP_FD int fd = -1;

	// What an image brings may be a link to what is not there.
	unlink("/etc/resolv.conf");
	fd = open("/etc/resolv.conf", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	if (fd < 0 || dprintf(fd, "nameserver %s\n", dns) < 0)
		failed("/etc/resolv.conf");
}

int net_set_mac(const uint8_t mac[6], struct err *err)
{
	struct ifreq ifr = {.ifr_name = IFNAME, .ifr_hwaddr.sa_family = ARPHRD_ETHER};
	CLEANUP_FD int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	memcpy(ifr.ifr_hwaddr.sa_data, mac, 6);
	if (fd < 0 || ioctl(fd, SIOCSIFHWADDR, &ifr) < 0)
		return err_errno(err, -errno, IFNAME ": its address");
	return 0;
}

void net_up(const char *words)
{
	struct ifreq ifr = {.ifr_name = IFNAME, .ifr_flags = IFF_UP | IFF_RUNNING};
	CLEANUP_FREE char *text = words ? strdup(words) : NULL;
	CLEANUP_FD int fd = -1;
	char *rest = text, *address, *gateway, *dns;

	if (!text)
		return;
	address = strsep(&rest, ",");
	gateway = strsep(&rest, ",");
	dns = strsep(&rest, ",");
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0) {
		failed("socket");
		return;
	}
	if (address[0])
		set_address(fd, address);
	if (ioctl(fd, SIOCSIFFLAGS, &ifr) < 0)
		failed("up");
	if (gateway && gateway[0])
		add_default_route(fd, gateway);
	if (dns && dns[0])
		write_resolv_conf(dns);
}
