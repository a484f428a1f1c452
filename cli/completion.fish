# SPDX-License-Identifier: Apache-2.0
# Completion for fish. It asks the program itself, so it knows the verbs and options that there are.

function __mayfly_verbs
    mayfly --help 2>/dev/null | string replace -rf '^  ([a-z]+) +(.*)' '$1\t$2'
end

function __mayfly_options
    set -l verb (commandline -opc)[2]
    mayfly $verb --help 2>/dev/null | string match -ar -- '(?<=^|[ ,{\[])--?[a-z][a-z-]*'
end

# The names of machines, or of pools; cp wants a colon behind them.
function __mayfly_names
    set -l verb (commandline -opc)[2]
    set -l list ps
    test "$verb" = pool; and set list pool ls
    set -l colon ''
    test "$verb" = cp; and set colon :
    for line in (mayfly $list 2>/dev/null | tail -n +2)
        echo (string split -f1 ' ' -- $line)$colon
    end
end

complete -c mayfly -n __fish_is_first_token -f -a '(__mayfly_verbs)'
complete -c mayfly -n 'not __fish_is_first_token; and string match -q -- "-*" (commandline -ct)' -f -a '(__mayfly_options)'
complete -c mayfly -n 'not __fish_is_first_token' -a '(__mayfly_names)'
