INSERT OR REPLACE INTO multiq_limits (queue, name, slots, rate, per, burst, fair, pinned)
VALUES (:queue, :name, :slots, :rate, :per, :burst, :fair, :pinned)
