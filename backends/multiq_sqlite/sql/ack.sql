DELETE FROM multiq_jobs WHERE seq IN (SELECT value FROM json_each(:seqs))
