# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Large folders and many machines on one, with FULL=1: 100,000 files and a file of 2 GiB come and go,
# and ten machines that are kept one after the other conflict exactly where they should. Best in the lab:
# tests/lab/lab run --timeout 3000 --memory 16000 --env FULL=1 -- …; where ring 0 is emulated a file
# costs the guest's kernel some 50 ms.
. "$(dirname "$0")/lib.sh"
if [ -z "${FULL:-}" ]; then
	skip "large folders and ten machines: with FULL=1"
	finish
fi
timed() { # NAME COMMAND…: ok or FAIL, with how long it took
	local name=$1 start=$EPOCHREALTIME
	shift
	check "$name" "$@"
	echo "   $name: $(echo "$start $EPOCHREALTIME" | awk '{ printf "%.1f s", $2 - $1 }')"
}
work() { (cd project && "$MAYFLY" work "$@"); }

# Ten machines on one folder. Each has a file of its own; 3 and 7 write one and the same file
# differently, 4 and 8 in the same way, 5 removes a folder in which 9 makes a file.
mkdir -p project/folder && echo old >project/shared && echo old >project/same && echo in >project/folder/in
for i in 0 1 2 3 4 5 6 7 8 9; do
	work --name "w$i" --memory 96M -- sh -c "echo $i >own-$i
		case $i in 3 | 7) echo $i >shared ;; 4 | 8) echo new >same ;; 5) rm -r folder ;; 9) echo x >folder/of-9 ;; esac" || fail "w$i"
done
for i in 0 1 2 3 4 5 6 7 8 9; do
	"$MAYFLY" keep "w$i" >keep.txt 2>&1
	status=$?
	case $i in 7 | 9) wanted=1 ;; *) wanted=0 ;; esac
	equal "ten machines: keep $i" "$status" "$wanted"
	case $i in 7) contains "ten machines: where 7 conflicts" "$(cat keep.txt)" "! shared" ;; esac
	case $i in 9) contains "ten machines: where 9 conflicts" "$(cat keep.txt)" "! folder" ;; esac
done
equal "ten machines: what is there" "$(cd project && echo * && cat shared same own-8)" \
	"own-0 own-1 own-2 own-3 own-4 own-5 own-6 own-8 same shared
3
new
8"
for i in 0 1 2 3 4 5 6 7 8 9; do "$MAYFLY" discard "w$i"; done
rm -rf project

# 100,000 files.
mkdir project && (cd project && for d in $(seq 1000); do mkdir "d$d"; for f in $(seq 100); do echo "$d $f" >"d$d/f$f"; done; done)
timed "100,000 files go in" work --name big --memory 1500M -- true
timed "one of them changes" "$MAYFLY" exec big -- sh -c 'echo changed >/work/project/d500/f50'
timed "what has changed is told" sh -c '[ "$("$0" diff --stat big)" = "M d500/f50" ]' "$MAYFLY"
timed "and comes back" "$MAYFLY" keep big
equal "it is there" "$(cat project/d500/f50)" changed
check "all of them change" "$MAYFLY" exec big -- sh -c 'cd /work/project && for f in */*; do echo new >$f; done'
timed "and all come back" sh -c '"$0" keep big >keep.txt' "$MAYFLY"
equal "they are there" "$(find project -type f -exec cat {} + | sort | uniq -c | tr -d ' ')" 100000new
"$MAYFLY" discard big
rm -rf project

# 2 GiB.
mkdir project && head -c 2G /dev/zero | tr '\0' x >project/huge
sum=$(sha256sum <project/huge)
timed "2 GiB go in" work --name huge --memory 6G -- true
check "they change" "$MAYFLY" exec huge -- sh -c 'echo more >>/work/project/huge'
rm project/huge && ln -s nothing project/huge
check "a conflict is told before anything comes out" sh -c '"$0" keep huge --max 3G >/dev/null 2>&1; [ $? = 1 ]' "$MAYFLY"
rm project/huge && head -c 2G /dev/zero | tr '\0' x >project/huge
equal "the same again" "$(sha256sum <project/huge)" "$sum"
timed "and come back" sh -c '"$0" keep --max 3G huge >/dev/null' "$MAYFLY"
equal "they are there" "$(tail -c 5 project/huge) $(stat -c %s project/huge)" "more $((2 * 1024 * 1024 * 1024 + 5))"
"$MAYFLY" discard huge
check "nothing left" nothing_left
finish
