#compdef mayfly
# SPDX-License-Identifier: Apache-2.0
# Completion for zsh. It asks the program itself, so it knows the verbs and options that there are.

local verb=$words[2]
local -a found list

if (( CURRENT == 2 )); then
	found=(${(f)"$($words[1] --help 2>/dev/null | sed -n 's/^  \([a-z][a-z]*\)  *\(.*\)/\1:\2/p')"})
	_describe 'verb' found
elif [[ $PREFIX == -* ]]; then
	found=(${(f)"$($words[1] $verb --help 2>/dev/null | grep -oE -- '(^|[ ,{[])--?[a-z][a-z-]*' | tr -d ' ,{[')"})
	compadd -- $found
else
	# The names of machines, or of pools; cp wants a colon behind them. Files besides.
	list=(ps)
	[[ $verb == pool ]] && list=(pool ls)
	found=(${(f)"$($words[1] $list 2>/dev/null | awk 'NR > 1 { print $1 }')"})
	if [[ $verb == cp ]]; then
		compadd -S : -- $found
	else
		compadd -- $found
	fi
	_files
fi
