-- Stores what a held job waits for, after the job itself is stored. If the job existed already, its terms stay as they were.
INSERT INTO multiq_terms (seq, awaits, delay)
SELECT seq, :awaits, :delay FROM multiq_jobs WHERE queue = :queue AND id = :id AND state = 4
ON CONFLICT DO NOTHING
