-- Stores that a member has arrived at a held job. For several members, the driver repeats the group after VALUES:
-- enqueue.sql gives the reason. The number of changed rows is the number of members that had not arrived before.
INSERT INTO multiq_arrivals (seq, member) VALUES (?, ?) ON CONFLICT DO NOTHING
