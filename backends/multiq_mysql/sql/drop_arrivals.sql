-- Deletes some arrivals at jobs that are no longer held. drop_expired.sql explains the form.
DELETE arrival FROM (
    SELECT job, member FROM multiq_arrivals FORCE INDEX (PRIMARY)
    WHERE job IN ({seqs})
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED
) AS dropped STRAIGHT_JOIN multiq_arrivals AS arrival FORCE INDEX (PRIMARY)
ON arrival.job = dropped.job AND arrival.member = dropped.member
