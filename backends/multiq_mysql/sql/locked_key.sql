-- Reads an entry that lock_keys.sql has locked in the caller's transaction. FOR UPDATE reads the present row. A plain SELECT
-- would read the transaction's snapshot, which may be older. The statement reads a single key. With several keys, the
-- servers might scan the table, and would then lock the gaps between the table's rows.
SELECT id, held_until > {now} FROM multiq_unique FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND unique_key = {key}
FOR UPDATE
