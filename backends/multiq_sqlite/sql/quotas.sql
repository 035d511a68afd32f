SELECT name, slots, rate, per, burst, fair, pinned FROM multiq_limits WHERE queue = :queue ORDER BY name
