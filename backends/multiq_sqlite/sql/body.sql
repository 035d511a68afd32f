SELECT body FROM multiq_bodies WHERE seq = :seq
