# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The Harbor environment, against Harbor's own classes where they are installed, and on a machine.
set -u
. "$(dirname "$0")/lib.sh"

harbor=$(cd "$(dirname "$0")/../../integrations/harbor" && pwd)
MAYFLY_IMAGE=builtin python3 "$harbor/test_mayfly_harbor.py" -v >out.txt 2>&1
status=$?
while read -r test rest; do
	case $rest in
	*'... ok') ok "$test" ;;
	*'... skipped '*) skip "$test:${rest##*skipped}" ;;
	*'... '*) fail "$test ${rest##*... }" ;;
	esac
done < <(grep '^test_.* \.\.\. ' out.txt)
equal 'the unit tests' $status 0
[ $status = 0 ] || cat out.txt
check 'nothing is left' nothing_left
finish
