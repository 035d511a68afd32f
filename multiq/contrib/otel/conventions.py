"""Names of OpenTelemetry's semantic conventions for messaging, version 1.44.0.

The names are copied here, because the package with the names of unstable conventions changes with each release.
"""

from __future__ import annotations

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SYSTEM = "multiq"

MESSAGING_SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
MESSAGE_ID = "messaging.message.id"
CONVERSATION_ID = "messaging.message.conversation_id"
BODY_SIZE = "messaging.message.body.size"
BATCH_COUNT = "messaging.batch.message_count"
CLIENT_ID = "messaging.client.id"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

EXCEPTION_TYPE = "exception.type"
EXCEPTION_MESSAGE = "exception.message"
EXCEPTION_STACKTRACE = "exception.stacktrace"

# multiq's own attributes of spans
TASK = "messaging.multiq.task"
ATTEMPT = "messaging.multiq.attempt"
PRIORITY = "messaging.multiq.priority"
BACKEND = "messaging.multiq.backend"
VERDICT = "messaging.multiq.verdict"
STATE = "messaging.multiq.state"

OPERATION_DURATION = "messaging.client.operation.duration"
SENT_MESSAGES = "messaging.client.sent.messages"
CONSUMED_MESSAGES = "messaging.client.consumed.messages"
PROCESS_DURATION = "messaging.process.duration"

# multiq's own metrics
JOB_OUTCOMES = "multiq.job.outcomes"
JOB_WAIT = "multiq.job.wait"
SCHEDULE_LATENESS = "multiq.schedule.lateness"
QUEUE_JOBS = "multiq.queue.jobs"
QUEUE_OLDEST_AGE = "multiq.queue.oldest_age"

DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds of the histograms of the conventions, in seconds."""
WAIT_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
