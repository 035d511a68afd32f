UPDATE multiq_bodies SET body = :body WHERE seq = :seq
