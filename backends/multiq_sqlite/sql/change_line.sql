UPDATE multiq_gates SET priority = iif(name = :name AND key = :key, :priority, NULL) WHERE seq = :seq
