SELECT unique_key, unique_until FROM multiq_memos WHERE seq = :seq AND unique_key IS NOT NULL
