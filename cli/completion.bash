# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Completion for bash. It asks the program itself, so it knows the verbs and options that there are.

_mayfly() {
	local word=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]-}
	local words

	COMPREPLY=()
	if [ "$COMP_CWORD" -eq 1 ]; then
		words=$("$1" --help 2>/dev/null | awk '/^  [a-z]+ /{ print $1 }')
	elif [[ $word == -* ]]; then
		words=$("$1" "$verb" --help 2>/dev/null | grep -oE -- '(^|[ ,{[])--?[a-z][a-z-]*' | tr -d ' ,{[')
	else
		# The names of machines, or of pools; cp wants a colon behind them, and files otherwise.
		local list=(ps)
		[ "$verb" = pool ] && list=(pool ls)
		words=$("$1" "${list[@]}" 2>/dev/null | awk 'NR > 1 { print $1 }')
		if [ "$verb" = cp ]; then
			compopt -o nospace
			words=$(printf '%s' "$words" | sed 's/$/:/')
		fi
	fi
	mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
# Where nothing fits: files.
complete -o default -o bashdefault -F _mayfly mayfly
