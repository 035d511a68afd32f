UPDATE multiq_bodies SET seq = :newest WHERE seq = :seq
