UPDATE multiq_terms SET delay = :delay WHERE seq = :seq
