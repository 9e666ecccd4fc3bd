# What a bash context knows before its first line of code; bash.py composes the lines it reads afterwards.
#
# Guards the end of an execution: it is reported once, by whichever comes first of the line after the code and the
# prompt, to which the shell returns from an interrupt or a failed expansion. fd 63: messages.

PS1= PS2= PROMPT_COMMAND='__ringfence_end $?'
unset HISTFILE MAILCHECK TMOUT
set +o history +o histexpand +o monitor
shopt -s expand_aliases

__ringfence_begin() {
    PROMPT_COMMAND='__ringfence_end $?'
    __ringfence_nonce=$1 __ringfence_status=
    builtin printf 'begin %s\n' "$1" >&63
    return "$2"
}

__ringfence_end() {
    if [[ -n $__ringfence_nonce ]]; then
        builtin printf 'done %s %d\n' "$__ringfence_nonce" "${__ringfence_status:-$1}" >&63
        __ringfence_nonce=
        if ((${#__ringfence_undo[@]})); then
            builtin eval -- "${__ringfence_undo[@]}"
            __ringfence_undo=()
        fi
    fi
    return 0
}

# A variable for one execution: NAME VALUE, or NAME alone to take it away. What it was is put back at the end.
__ringfence_set() {
    [[ $1 =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || return 0
    if [[ -v $1 ]]; then
        local -n __ringfence_old=$1
        if [[ ${__ringfence_old@a} == *x* ]]; then
            __ringfence_undo+=("export $1=${__ringfence_old@Q};")
        else
            __ringfence_undo+=("export -n $1=${__ringfence_old@Q};")
        fi
        unset -n __ringfence_old
    else
        __ringfence_undo+=("unset -v $1;")
    fi
    if (($# == 2)); then export "$1=$2"; else unset -v "$1"; fi
}

__ringfence_nonce= __ringfence_status= __ringfence_undo=()
builtin printf 'ready\n' >&63
exec 2>/dev/null
