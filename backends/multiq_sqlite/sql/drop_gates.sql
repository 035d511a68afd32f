DELETE FROM multiq_gates WHERE seq = :seq
