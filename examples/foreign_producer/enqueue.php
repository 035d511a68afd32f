<?php
// Put a job into beanstalkd with nothing but PHP. Prints the job's id.
//
//   php enqueue.php HOST PORT QUEUE TASK [ARGUMENT...]    a task's job, in the envelope that docs/envelope.md describes
//   php enqueue.php HOST PORT QUEUE --raw BODY            any bytes, for a consumer that reserves them from the queue

declare(strict_types=1);

const PRIORITY = 1024; // 0 goes first
const DELAY = 0;       // seconds
const TTR = 60;        // seconds that a worker may go without a sign of life
const PATIENCE = 5;    // seconds

[, $host, $port, $queue, $task] = $argv;
$body = $task === '--raw' ? $argv[5] : envelope($task, array_slice($argv, 5));
echo put($host, (int) $port, $queue, $body), "\n";

function envelope(string $task, array $arguments): string
{
    return json_encode(
        ['multiq' => 1, 'task' => $task, 'args' => $arguments, 'kwargs' => (object) []], // an empty array would become a list
        JSON_THROW_ON_ERROR | JSON_UNESCAPED_UNICODE
    );
}

/** The id of the new job. */
function put(string $host, int $port, string $queue, string $body): int
{
    $socket = stream_socket_client("tcp://$host:$port", $code, $error, PATIENCE);
    if ($socket === false) {
        throw new RuntimeException("cannot reach $host:$port: $error");
    }
    stream_set_timeout($socket, PATIENCE);
    ask($socket, "use $queue\r\n", 'USING');
    $command = sprintf("put %d %d %d %d\r\n", PRIORITY, DELAY, TTR, strlen($body));
    return (int) ask($socket, "$command$body\r\n", 'INSERTED');
}

/** What follows the word that the server must answer with. */
function ask($socket, string $command, string $expected): string
{
    fwrite($socket, $command);
    $reply = rtrim((string) fgets($socket), "\r\n");
    [$word, $rest] = explode(' ', "$reply ", 2);
    if ($word !== $expected) {
        throw new RuntimeException('not enqueued: ' . ($reply === '' ? 'no answer' : $reply));
    }
    return rtrim($rest);
}
