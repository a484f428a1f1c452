/* SPDX-License-Identifier: Apache-2.0 */
/* The default initramfs, inside the program, on pages of its own: once it has been copied into a
 * guest they are given back. */
	.section .rodata.builtin, "a"
	.balign 4096
	.globl builtin_initramfs
	.hidden builtin_initramfs
	.type builtin_initramfs, @object
builtin_initramfs:
	.incbin INITRAMFS
	.globl builtin_initramfs_end
	.hidden builtin_initramfs_end
builtin_initramfs_end:
	.balign 4096
	.size builtin_initramfs, . - builtin_initramfs
	.section .note.GNU-stack, "", @progbits
