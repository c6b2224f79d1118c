#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Is the service at a URL there, and does it answer? Asks whether it is ready, which model it has, for one chat answer,
# and for the same answer as a stream. A model without a chat template, which is no chat's, is asked to complete a text.
# A status 503 says that the service is being replaced, as Ray Serve does: it is waited for again, and asked all again.
# Needs curl and nothing else, so that people, CI and a pod's hook use it alike.
#
#   deploy/smoke.sh http://127.0.0.1:8000
#   METRALE_API_KEY=... deploy/smoke.sh --wait 600 https://llm.example.org
#
# The key is never shown, and stands in no list of processes and in no file.
#
# Exit codes
#   0         every answer was as it should be
#   1         an answer was wrong, or none came
#   2         a mistake in the arguments, or curl is missing
#   3         the service was not ready in time
#   4         the service wants a key, or another one
#   130, 143  interrupted, terminated
#
# What it leaves out: whether the words make sense, and how fast they come (`metrale-ray bench serve`).

set -eu
LC_ALL=C
export LC_ALL

WRONG=1 MISTAKE=2 NOT_READY=3 NO_KEY=4
REPLACED=75      # of the checks, where they met a 503; never of this script
SHOWN_BYTES=300 # of an answer that is wrong; more would hide the message
PROBE_S=10      # for one question whether it is ready
PAUSE_S=1       # between two of them
WORD_S=10       # of silence while it waits

wait_s=60
timeout_s=120
model=
url=
way=chat        # or completion
key=${METRALE_API_KEY-}
unset METRALE_API_KEY # curl has no use for it in its environment

usage() {
    cat <<'END'
usage: smoke.sh [--wait SECONDS] [--timeout SECONDS] [--model NAME] URL

  URL                of the service, such as http://127.0.0.1:8000 (with /v1 or without)
  --wait SECONDS     how long it may take until it is ready (default: 60; 0 asks once);
                     time in which the service is being replaced counts too
  --timeout SECONDS  how long each answer may take (default: 120)
  --model NAME       the model to ask (default: the first that /v1/models names)
  METRALE_API_KEY    variable with the service's key, if it has one
END
}

fail() { # CODE MESSAGE
    echo "error: $2" >&2
    exit "$1"
}

# What a server sent, fit for a message: one line, no control characters, not too long.
shown() { # FILE
    if [ -s "$1" ]; then
        head -c "$SHOWN_BYTES" "$1" | tr '\n\r\t' '   ' | tr -cd '\40-\176\200-\377'
    else
        printf '(nothing)'
    fi
}

check_seconds() { # FLAG VALUE
    case $2 in
    '' | *[!0-9]* | ???????*) fail "$MISTAKE" "$1 is '$2'; it must be a whole number of seconds, such as 60" ;;
    esac
}

parse_arguments() {
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --wait | --timeout | --model)
            [ $# -ge 2 ] || fail "$MISTAKE" "$1 needs a value; see --help"
            case $1 in
            --wait) wait_s=$2 ;;
            --timeout) timeout_s=$2 ;;
            --model) model=$2 ;;
            esac
            shift
            ;;
        -*) fail "$MISTAKE" "unknown flag $1; see --help" ;;
        *)
            [ -z "$url" ] || fail "$MISTAKE" "two URLs, $url and $1; give one"
            url=$1
            ;;
        esac
        shift
    done
}

check_arguments() {
    [ -n "$url" ] || fail "$MISTAKE" "no URL given, such as http://127.0.0.1:8000; see --help"
    case $url in
    http://?* | https://?*) ;;
    *) fail "$MISTAKE" "the URL is '$url'; it must begin with http:// or https://" ;;
    esac
    url=${url%/}
    url=${url%/v1}
    check_seconds --wait "$wait_s"
    check_seconds --timeout "$timeout_s"
    [ "$timeout_s" -gt 0 ] || fail "$MISTAKE" "--timeout is 0; an answer needs at least 1 second"
    case $model in
    *[\\\"]* | *[![:print:]]*) fail "$MISTAKE" "--model may hold no quotes, backslashes or other than ASCII characters" ;;
    esac
    case $key in
    *[!!-~]*) fail "$MISTAKE" "METRALE_API_KEY holds a space, a line break or another character that no key may have" ;;
    esac
    command -v curl >/dev/null || fail "$MISTAKE" "curl is not installed"
}

# One request. The answer's body is in $folder/body then, curl's complaint in $folder/complaint, and `status` is the
# HTTP status, 000 where none came whole. The key goes to curl through a pipe: a list of processes does not show it.
ask() { # SECONDS PATH [ARGUMENT OF CURL ...]
    limit_s=$1
    address=$url$2
    shift 2
    : >"$folder/body"
    if ! status=$(authorization | curl --config - --silent --show-error --globoff --no-buffer --connect-timeout 5 \
        --max-time "$limit_s" --output "$folder/body" --write-out '%{http_code}' "$@" -- "$address" \
        2>"$folder/complaint"); then
        status=000
    fi
}

authorization() {
    [ -z "$key" ] || printf 'header = "Authorization: Bearer %s"\n' "$(printf '%s' "$key" | sed 's/[\\"]/\\&/g')"
}

check_key() {
    case $status in
    401 | 403)
        if [ -n "$key" ]; then
            fail "$NO_KEY" "the service refuses the key of METRALE_API_KEY (status $status): $(shown "$folder/body")"
        fi
        fail "$NO_KEY" "the service wants a key (status $status); set METRALE_API_KEY"
        ;;
    esac
}

why() {
    if [ "$status" = 000 ]; then shown "$folder/complaint"; else echo "status $status: $(shown "$folder/body")"; fi
}

passed_s() {
    echo $(($(date +%s) - started))
}

# A pause before the next try, or the end of the time. Now and then it says that it waits, and why.
pause() { # REASON
    waited_s=$(passed_s)
    [ "$waited_s" -lt "$wait_s" ] ||
        fail "$NOT_READY" "not ready after $waited_s s: $1; on Ray Serve, \`serve status\` may say why"
    if [ "$waited_s" -ge "$next_word_s" ]; then
        echo "waiting: $waited_s s, $1" >&2
        next_word_s=$((waited_s + WORD_S))
    fi
    sleep "$PAUSE_S"
}

# A proxy in front, or Ray Serve's, answers 404 or 502 while the service is on its way; so only a 200 ends the wait.
wait_until_ready() {
    while :; do
        left_s=$((wait_s - $(passed_s)))
        [ "$left_s" -le "$PROBE_S" ] || left_s=$PROBE_S
        [ "$left_s" -ge 1 ] || left_s=1
        ask "$left_s" /health/ready
        check_key
        [ "$status" != 200 ] || break
        pause "$(why)"
    done
    echo "ready after $(passed_s) s"
}

check_status() { # WHAT
    check_key
    case $status in
    200) ;;
    503)
        echo "$1: $(why)" >"$folder/reason"
        exit "$REPLACED"
        ;;
    *) fail "$WRONG" "$1: $(why)" ;;
    esac
}

# The texts under a name in JSON, one in each line, as they stand there between the quotes. A name inside a text has
# backslashes before its quotes, so it is not found.
texts() { # NAME FILE
    awk -v name="$1" '
        BEGIN { pattern = "\"" name "\"[ \t]*:[ \t]*\"([^\"\\\\]|\\\\.)*\"" }
        {
            rest = $0
            while (match(rest, pattern)) {
                found = substr(rest, RSTART, RLENGTH)
                sub("^\"" name "\"[ \t]*:[ \t]*\"", "", found)
                print substr(found, 1, length(found) - 1)
                rest = substr(rest, RSTART + RLENGTH)
            }
        }' "$2"
}

find_model() {
    ask "$timeout_s" /v1/models
    check_status "GET /v1/models"
    known=$(texts id "$folder/body")
    [ -n "$known" ] || fail "$WRONG" "GET /v1/models names no model: $(shown "$folder/body")"
    if [ -z "$model" ]; then
        model=$(printf '%s\n' "$known" | head -n 1)
    elif ! printf '%s\n' "$known" | grep -Fqx -- "$model"; then
        fail "$WRONG" "the service has no model '$model'; it has: $(printf '%s' "$known" | tr '\n' ' ')"
    fi
    echo "model $model"
}

# What is asked, by the way that the model knows. Its name is still as JSON has it.
ask_model() { # true|false, for a stream or not
    case $way in
    chat)
        route=/v1/chat/completions
        prompt='"messages": [{"role": "user", "content": "What is the capital of France?"}]'
        ;;
    completion)
        route=/v1/completions
        prompt='"prompt": "The capital of France is"'
        ;;
    esac
    printf '{"model": "%s", %s, "max_tokens": 16, "temperature": 0, "stream": %s}' "$model" "$prompt" "$1" \
        >"$folder/question"
    ask "$timeout_s" "$route" --header 'Content-Type: application/json' --data-binary "@$folder/question"
}

# The answer's text, its reasoning included, and how it ended.
check_text() { # WHAT FILE
    text=$(
        case $way in
        chat)
            texts reasoning_content "$2"
            texts content "$2"
            ;;
        completion) texts text "$2" ;;
        esac
    )
    text=$(printf '%s' "$text" | tr -d '\n')
    [ -n "$text" ] || fail "$WRONG" "$1: the answer has no text: $(shown "$2")"
    reason=$(texts finish_reason "$2")
    case $reason in
    stop | length) ;;
    '') fail "$WRONG" "$1: the answer has no finish_reason: $(shown "$2")" ;;
    *) fail "$WRONG" "$1: the finish_reason is '$(printf '%s' "$reason" | tr '\n' ' ')', not stop or length" ;;
    esac
}

check_whole() {
    ask_model false
    if [ "$status" = 400 ] && [ "$(texts code "$folder/body")" = no_chat_template ]; then
        echo "chat: the model has no chat template; it is asked to complete a text"
        way=completion
        ask_model false
    fi
    check_status "$way"
    check_text "$way" "$folder/body"
    printf '%s' "$text" >"$folder/text"
    echo "$way: \"$(shown "$folder/text")\" ($reason)"
}

check_stream() {
    ask_model true
    check_status "stream"
    tr -d '\r' <"$folder/body" | sed -n 's/^data: *//p' >"$folder/events"
    [ -s "$folder/events" ] || fail "$WRONG" "stream: no event came: $(shown "$folder/body")"
    if grep '^{ *"error"' "$folder/events" >"$folder/text"; then
        fail "$WRONG" "stream: it ended with an error: $(shown "$folder/text")"
    fi
    [ "$(tail -n 1 "$folder/events")" = '[DONE]' ] || fail "$WRONG" "stream: it ended without [DONE]"
    check_text "stream" "$folder/events"
    echo "stream: $(grep -c . "$folder/events") events, [DONE] ($reason)"
}

parse_arguments "$@"
check_arguments
umask 077
folder=$(mktemp -d "${TMPDIR:-/tmp}/smoke.XXXXXX")
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
started=$(date +%s)
next_word_s=$WORD_S
while :; do
    wait_until_ready
    # In a process of their own, so that any of them can end them all, and the next try knows nothing of this one.
    set +e # what ends them is no end yet; after || or in an if, they would not stop at an error
    (
        set -e
        find_model
        check_whole
        check_stream
    )
    code=$?
    set -e
    [ "$code" = "$REPLACED" ] || break
    next_word_s=0
    pause "$(cat "$folder/reason")"
done
[ "$code" = 0 ] || exit "$code"
echo "ok"
