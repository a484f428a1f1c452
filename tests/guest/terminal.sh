# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Terminals, as a person sees them: tmux holds the screens on which `mayfly shell` runs, types and looks.
. "$(dirname "$0")/lib.sh"

if ! command -v tmux >/dev/null; then
	skip "terminals: tmux is missing (make deps)"
	finish
fi
export LC_ALL=C.UTF-8
vm=terminal-test
tm() { tmux -u -L "mayfly-$$" -f /dev/null "$@"; }
cleanup() {
	tm kill-server 2>/dev/null
	"$MAYFLY" down $vm >/dev/null 2>&1
	"$MAYFLY" rm $vm >/dev/null 2>&1
}
trap cleanup EXIT
"$MAYFLY" create $vm >/dev/null && "$MAYFLY" up $vm >/dev/null || {
	fail "a machine for the tests"
	finish
}

# A screen of its own keeps the server, which would end with its last one while the next is asked for; and
# a screen outlives what ran on it, so that its last words can be read.
tm new-session -d -s keep "sleep 100000" \; set -g remain-on-exit on \; set -g history-limit 5000

# screen NAME COLUMNS ROWS ARGS…: mayfly ARGS on a screen. Its status goes to a file: tmux does not always
# hear of the end of what it started.
screen() {
	tm new-session -d -s "$1" -x "$2" -y "$3" sh -c '"$@"; echo $? >"$0"' "$PWD/status.$1" "$MAYFLY" "${@:4}"
}
type_in() { tm send-keys -t "$1" "${@:2}"; }
look() { tm capture-pane -p -t "$1" "${@:2}"; }

on_screen() {
	case $(look "$1" 2>/dev/null) in *"$2"*) ;; *) return 1 ;; esac
}
# shows CHECK SCREEN TEXT: the text comes to stand on the screen.
shows() {
	if until_true on_screen "$2" "$3"; then
		ok "$1"
		return
	fi
	fail "$1: no '$3' on the screen:"
	look "$2" | sed 's/^/  |/'
	finish # what follows builds on it
}
# ended CHECK SCREEN STATUS
ended() {
	until_true [ -s "status.$2" ]
	equal "$1" "$(cat "status.$2")" "$3"
}
# At its prompt busybox asks the terminal where the cursor is, and each terminal of a session answers. Once
# the prompt shows what was typed on all of them, the answers have been read, and cannot come to the next
# program, which might take them for something else.
# settled CHECK SCREEN…
settled() {
	local name=$1 screen typed=
	shift
	for screen in "$@"; do
		type_in "$screen" x
		typed+=x
		shows "$name: $screen" "$screen" "mayfly:/# $typed"
	done
	type_in "$1" C-u
}

# --- A shell that goes with its terminal -----------------------------------------------------

screen plain 80 24 shell $vm
settled "a prompt" plain
type_in plain 'stty size; tty' Enter
shows "the size of the terminal" plain "24 80"
shows "it has a name" plain /dev/pts/
tm resize-window -t plain -x 100 -y 30
type_in plain 'clear; echo $(stty size)' Enter
shows "a resize" plain "30 100"
type_in plain 'clear; echo grüße-日本 | wc -m; echo "<grüße-日本>"' Enter
shows "UTF-8 out" plain "<grüße-日本>"
# The one who sleeps says so: by then the keyboard's signals are his, and not the shell's.
type_in plain 'clear; sh -c "echo sleep-\$((6 * 7)); exec sleep 1000"' Enter
shows "a command that takes long" plain sleep-42
type_in plain C-c
type_in plain 'echo alive-$((40 + 2))' Enter
shows "Ctrl-C ends it and not the shell" plain "alive-42"
type_in plain 'clear; echo cat-$((6 * 7)); cat' Enter
shows "a command that waits for input" plain cat-42
type_in plain 'through-cat-ä' Enter
shows "a command that reads" plain $'through-cat-ä\nthrough-cat-ä'
type_in plain C-z
shows "Ctrl-Z stops it" plain "Stopped"
type_in plain 'clear; jobs; echo jobs-$((6 * 7))' Enter
shows "and returns to the shell" plain jobs-42
contains "of which it is a job" "$(look plain)" Stopped
type_in plain 'clear; echo fg-$((6 * 7)); fg' Enter
shows "fg" plain fg-42
type_in plain 'once-more' Enter
shows "goes on with it" plain $'once-more\nonce-more'
type_in plain C-d
type_in plain 'echo eof-$((6 * 7))' Enter
shows "Ctrl-D is the end of its input" plain "eof-42"
type_in plain 'exit 7' Enter
ended "the shell's status" plain 7

# --- A session: what stays --------------------------------------------------------------------

screen one 80 24 shell -s work $vm
settled "a session" one
type_in one 'clear; seq 1000 >numbers; echo kept-$((20 + 3))' Enter
shows "work" one "kept-23"
settled "and a prompt" one
type_in one 'less numbers' Enter
shows "less: the first page" one $'22\n23\nnumbers'
type_in one G
shows "less: the last one" one "1000"
screen two 80 24 shell -s work $vm
shows "a second terminal: what the first shows" two "1000"
type_in two g
shows "what it types is seen by both" one $'1\n2\n3\n4'
shows "also by itself" two $'1\n2\n3\n4'
screen three 60 20 shell -s work $vm
shows "a third, smaller one" three $'15\n16\n17\n18\n19'
type_in three q
type_in three 'clear; echo out-of-$((3 * 3))less' Enter
for name in one two three; do shows "less has ended on $name" $name "out-of-9less"; done

type_in one C-]
ended "Ctrl-] leaves" one 0
shows "and says how to come back" one "mayfly shell -s work $vm"
settled "a prompt for two" two three
type_in two 'vi numbers' Enter
shows "vi" two "numbers 1/1000"
type_in two 'itext-ä' Escape
shows "vi: text" two "text-ä1"
screen four 80 24 shell -s work $vm
shows "a terminal that comes while vi runs" four "text-ä1"
shows "shows all of it" four $'2\n3\n4\n5'
tm kill-session -t two
type_in four ':wq' Enter
type_in four 'clear; head -n 1 numbers; echo "<$(stty size)>"' Enter
shows "vi wrote it, though its terminal vanished" four "text-ä1"
shows "the size is that of who came last" four "<24 80>"
tm resize-window -t four -x 90 -y 40
type_in four 'clear; echo "<$(stty size)>"' Enter
shows "a resize of a session" four "<40 90>"

# All leave; the session works on; who comes back sees what went on meanwhile, and before.
type_in four 'clear; seq 60 | sed "s/^/before-/"; echo wait-$((6 * 7)); while [ ! -e go ]; do sleep 0.1; done; for i in $(seq 60); do echo line-$i; done' Enter
shows "a command that waits" four wait-42
tm kill-session -t four
type_in three C-]
ended "the last one leaves" three 0
equal "the session is a job" "$("$MAYFLY" jobs $vm work | awk 'END { print $1, $2, $4 }')" "work running yes"
"$MAYFLY" exec $vm -- touch /go
screen five 80 24 shell -s work $vm
shows "back again: what went on" five "line-60"
lines() { look five -S - | grep -c '^line-[0-9]*$'; }
equal "all of it, in the scrollback" "$(lines)" 60
contains "and what was before" "$(look five -S -)" "before-2"
type_in five 'clear; exit 5' Enter
ended "the end of the session" five 5
equal "it is gone" "$("$MAYFLY" jobs $vm | grep -c work)" 0

cleanup
trap - EXIT
check "nothing left" nothing_left
finish
