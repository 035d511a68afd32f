UPDATE multiq_gates SET seq = :newest, priority = NULL, token = NULL WHERE seq = :seq
