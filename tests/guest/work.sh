# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# From a folder to a command in a machine, and back as one: what comes home, what does not, what a
# hostile guest hands out, a set-up that is done once. (Kills at each call of keep: tests/unit/work_test.)
. "$(dirname "$0")/lib.sh"
unset GIT_DIR
export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a \
	GIT_COMMITTER_EMAIL=a@b

tree_hash() { # of a folder: names, types, rights, links, content
	(cd "$1" && find . -path ./.git -prune -o -printf '%y %m %p %l\0' | sort -z | sha256sum
	find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum)
}
work() { # in the project; its output in $out, errors in $errors, status in $status
	out=$(cd project && "$MAYFLY" work --name w "$@" 2>../stderr.txt)
	status=$?
	errors=$(cat stderr.txt)
}
in_guest() { "$MAYFLY" exec w -- sh -c "cd /work/project && $1"; }

mkdir -p project/src project/gone/sub project/junk
(
	cd project || exit
	echo one >src/a && echo two >src/b && echo x >gone/x && echo y >gone/sub/y
	echo same >host-and-guest && echo script >run.sh && ln -s src/a link && echo secret >junk/key
	echo junk/ >.mayflyignore
	printf '[work]\nmemory = 96M\nsetup = cat deps >/tmp/made; cat /proc/sys/kernel/random/uuid >/tmp/once\ncache = deps\npersist = ~/.cache/tool /no/such\nenv = FROM_INI=yes\n' >.mayfly.ini
	echo v1 >deps
	git init -q -b main --template= && mkdir -p .git/info .git/hooks && printf 'junk\n' >.git/info/exclude && git add . && git commit -qm first
)
before=$(tree_hash project)

work -- sh -c 'pwd; ls -d .git/HEAD; cat src/a; readlink link; ls junk 2>&1; echo $FROM_INI; cat /tmp/made; exit 7'
equal "a command in the folder: its status" "$status" 7
equal "a command in the folder" "$out" "/work/project
.git/HEAD
one
src/a
ls: junk: No such file or directory
yes
v1"

# All kinds of changes; the host's folder stays as it is until they are kept.
work -- sh -c 'echo 1 >src/a; chmod +x run.sh; rm -r gone; mkdir empty new; echo n >new/f
	mv src/b src/moved; ln -s ../src new/up; echo same >host-and-guest; echo ign >junk-not
	mkdir -p junk ~/.cache/tool; echo cached >~/.cache/tool/f; ln -s /etc/shadow ~/.cache/tool/l; echo i >junk/i; echo e >.git/hooks/post-checkout; echo q >"new/$(printf "l\nine")"'
equal "changes" "$status" 0
equal "the host's folder is as it was" "$(tree_hash project)" "$before"
"$MAYFLY" diff w >diff.txt
equal "diff: names" "$(sed '/^$/,$d' diff.txt)" '- .git/hooks/post-checkout: git on this host would run what it says (kept only if it is named)
A empty/
D gone/
D gone/sub/
D gone/sub/y
D gone/x
A junk-not
A new/
A new/f
A "new/l\nine"
A new/up
M run.sh: executable now
M src/a
R src/b -> src/moved'
contains "diff: lines" "$(cat diff.txt)" "-one
+1"
check "diff --json" sh -c '"$0" diff --json w | python3 -c "
import json, sys
d = {c[\"path\"]: c for c in json.load(sys.stdin)}
assert d[\"src/moved\"][\"from\"] == \"src/b\" and d[\"run.sh\"][\"notes\"] == [\"exec\"]
assert d[\".git/hooks/post-checkout\"][\"withheld\"] and not d[\"src/a\"][\"conflict\"]"' "$MAYFLY"

# Its history (a command that begins while a point is taken may be in two); back to how it came in;
# and back to before that.
check "history: who has changed what" sh -c '"$0" history --json w | python3 -c "
import json, sys
p = json.load(sys.stdin)
by, changes = p[-1][\"by\"][-1], {c[\"path\"]: c[\"change\"] for x in p for c in x[\"changes\"]}
assert by[\"tool\"] == \"work\" and \"chmod +x run.sh\" in by[\"what\"]
assert changes[\"run.sh\"] == \"changed\" and changes[\"gone/x\"] == \"deleted\" and changes[\"new/l\\nine\"] == \"added\""' "$MAYFLY"
"$MAYFLY" undo w 0 >/dev/null
equal "undo: as it came in" "$("$MAYFLY" diff w)" ""
"$MAYFLY" undo w >/dev/null
equal "undo of that: as it was" "$("$MAYFLY" diff w)" "$(cat diff.txt)"
contains "undo: both are points" "$("$MAYFLY" history w | tail -n 40)" "undo: 0"

# The host has changed something too.
echo host >project/src/a
"$MAYFLY" keep w >/dev/null 2>stderr.txt
equal "a conflict: status" $? 1
contains "a conflict: it is told" "$(cat stderr.txt)" "! src/a: changed on this host meanwhile, too"
check "a conflict: nothing is kept" test ! -e project/new -a -e project/gone/x
"$MAYFLY" keep w new run.sh >/dev/null 2>stderr.txt
equal "parts without it" $? 0
check "parts without it: they are there" sh -c '[ -x project/run.sh ] && [ -L project/new/up ] && [ -e project/gone/x ]'
check "a patch" "$MAYFLY" keep --as-patch w.patch w src/moved gone
check "a patch: git takes it" git -C project apply --check ../w.patch
(cd project && git stash -q -u)
check "a branch" "$MAYFLY" keep --as-branch agent w gone
equal "a branch: one commit" "$(git -C project diff --name-status main agent)" "D	gone/sub/y
D	gone/x"
(cd project && git stash pop -q)
echo one >project/src/a
"$MAYFLY" keep w >/dev/null 2>stderr.txt
equal "everything" $? 0
equal "everything: as in the guest" \
	"$(cd project && cat src/a src/moved; ls -d gone src/b empty junk/key new/l* .git/hooks/post-checkout 2>/dev/null)" "1
two
empty
junk/key
new/l
ine"
equal "then nothing else differs" "$("$MAYFLY" diff --stat w)" \
	"- .git/hooks/post-checkout: git on this host would run what it says (kept only if it is named)"
check "it is all in the record, under one id" sh -c '"$0" audit --json w | python3 -c "
import json, sys
r = [json.loads(l) for l in sys.stdin]
assert len({x[\"run\"] for x in r}) == 1 and r[0][\"tool\"] == \"work\" and r[1][\"exit_code\"] == 7
assert any(\"M src/a\" in x.get(\"files\", []) for x in r if x[\"tool\"] == \"keep\")
assert any(x.get(\"point\") == 1 for x in r)"; "$0" audit verify w >/dev/null; "$0" replay w | grep -q "= .M src/a"' "$MAYFLY"

# A hostile guest: names, links, devices, another file behind a name.
in_guest 'ln -s /etc/passwd evil; ln -s ../../.. up; mknod null c 1 3; mkfifo pipe
	mkdir -p d; touch d/A d/a; echo x >"d/$(printf "\377\033[2J")"; ln src/a hard; mkdir .mayfly-keep; echo j >.mayfly-keep/journal'
before=$(tree_hash project)
"$MAYFLY" keep w >out.txt 2>stderr.txt
equal "a hostile tree: refused" $? 1
contains "a hostile tree: why" "$(cat stderr.txt)" "! evil: a symbolic link that leads out of the folder"
equal "a hostile tree: nothing has changed" "$(tree_hash project)" "$before"
"$MAYFLY" keep w d hard >out.txt 2>stderr.txt
equal "a hostile tree: its harmless part" $? 0
contains "a hostile tree: names are quoted" "$(cat out.txt)" 'A "d/\377\033[2J"'
contains "a hostile tree: names that differ by case" "$(cat out.txt)" "A d/a: differs from another by case alone"
check "a hostile tree: a file of its own" sh -c '[ "$(stat -c %h project/hard)" = 1 ] && [ ! -e project/null ] && [ ! -e project/.mayfly-keep ]'

# Another machine of the folder begins after the set-up, with the folder as it is now.
once=$("$MAYFLY" exec w -- cat /tmp/once)
"$MAYFLY" discard w
equal "discard" "$("$MAYFLY" ps --json)" "[]"
rm project/hard
work --keep-on-success -- sh -c 'cat /tmp/once; cat src/a ~/.cache/tool/f; readlink ~/.cache/tool/l; ls gone hard 2>/dev/null; echo kept >later'
equal "a second machine: the set-up was done before, the folder is today's, and what was handed on" "$out" "$once
1
cached
/etc/shadow
A later"
check "a second machine: success is kept" grep -q kept project/later
equal "a second machine: and it is gone" "$("$MAYFLY" ps --json)" "[]"
before=$(tree_hash project)
work --keep-on-success -- sh -c 'rm -rf ./* .git; exit 1'
equal "everything deleted and a failure: status" "$status" 1
equal "everything deleted and a failure: the folder is as it was" "$(tree_hash project)" "$before"
check "nothing left" nothing_left
finish
