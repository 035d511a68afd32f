-- Drops the gates that an earlier job has left to a new job: SQLite may have given the row number of a deleted job to it. A
-- program without limits, for example an older multiq that is still running, deletes a job without its gates.
DELETE FROM multiq_gates WHERE seq = (SELECT seq FROM multiq_jobs WHERE queue = :queue AND id = :id)
