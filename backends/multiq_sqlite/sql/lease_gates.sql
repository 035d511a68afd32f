UPDATE multiq_gates SET priority = NULL, token = :token WHERE seq = :seq
