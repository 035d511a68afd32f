#!/bin/sh
# Put a job into beanstalkd with nothing but a shell and netcat. Prints the job's id.
#
#   enqueue.sh HOST PORT QUEUE BODY
#
# A task's job, in the envelope that docs/envelope.md describes:
#   enqueue.sh 127.0.0.1 11300 mail '{"multiq": 1, "task": "send_reset_mail", "args": ["ann@example.com"]}'
# Anything else, for a consumer that reserves it from the queue:
#   enqueue.sh 127.0.0.1 11300 mail 'any bytes but NUL'
set -eu
host=$1 port=$2 queue=$3 body=$4

priority=1024 # 0 goes first
delay=0       # seconds
ttr=60        # seconds that a worker may go without a sign of life
length=$(printf %s "$body" | wc -c) # bytes, not characters

reply=$(
    printf 'use %s\r\nput %d %d %d %d\r\n%s\r\nquit\r\n' "$queue" "$priority" "$delay" "$ttr" "$length" "$body" |
        nc -w 5 "$host" "$port" | tr -d '\r'
)
case $reply in # two lines; a queue that is refused would leave the job in another one
"USING $queue
INSERTED "*) printf '%s\n' "${reply##*INSERTED }" ;;
*)
    printf 'not enqueued: %s\n' "${reply:-no answer from $host:$port}" >&2
    exit 1
    ;;
esac
