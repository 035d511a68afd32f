DELETE FROM multiq_jobs WHERE seq = :seq
